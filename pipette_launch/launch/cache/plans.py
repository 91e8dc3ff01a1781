"""Plans kept from job to job, each in a folder named by the key of what it depends on."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch.errors import FileFormatError, PlanError
from pipette_launch.facts import Measurements, Plan, files
from pipette_launch.facts.outcome import Outcome
from pipette_launch.launch.cache.folder import inside, read_kept
from pipette_launch.launch.cache.plan_files import check_belongs
from pipette_launch.megatron.allocator import VARIABLES as ALLOCATOR_VARIABLES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipette_launch.facts import Host, Job

logger = logging.getLogger(__name__)

PLAN = "plan.json"
CLUSTER = "cluster.json"
OUTCOME = "outcome.json"
OUTCOMES = "outcomes"
"""The folder of what all jobs came to, in a folder for each kind of machine."""
MOST_OUTCOMES = 200
"""So many of the newest are read."""


STEERING = (
    # torch and its compiler; the allocator decides how much memory is lost to fragments.
    *(*ALLOCATOR_VARIABLES, "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    *("TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_ALLOW_TF32_", "TORCH_BLAS_PREFER_", "TORCH_COMPILE_", "TORCH_NCCL_"),
    # CUDA and its libraries.
    *("CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_MPS_", "NVIDIA_TF32_OVERRIDE", "NVTE_"),
    # Networks: libfabric and its plugin for NCCL (EFA), SHARP, UCX, NVSHMEM (DeepEP).
    *("FI_", "GLOO_", "NCCL_", "NVSHMEM_", "OFI_NCCL_", "SHARP_", "UCX_"),
    # CPUs.
    *("ATEN_CPU_CAPABILITY", "KMP_", "MKL_", "OMP_", "ONEDNN_"),
)
"""Beginnings of the variables that change speed or memory. CUDA_VISIBLE_DEVICES is not among them: UUIDs are."""
TELLING = ("DEBUG", "FILE", "LOG", "DUMP", "TRACE", "VERBOSE")
"""Words in the names of variables of logs, whose values may differ from job to job."""
FOLDERS = ("_DIR", "_DIRECTORY", "_PATH")
"""Ends of the names of variables of folders, whose values may differ from job to job. `_DIRECT_` is no such end."""


def key_of(
    hosts: Sequence[Host],
    job: Job,
    versions: dict[str, str],
    settings: Sequence[float | str],
    environ: Mapping[str, str],
) -> str:
    """Digest everything that a plan depends on.

    What changes from minute to minute (free memory) is left out. So are the budget, for the plan of a short warm-up is
    a plan, and the order of the hosts, for a plan names them.
    """
    # Notes are prose, and the number of iterations changes no step.
    work = replace(job, notes=(), train_iters=None, log_interval=1)
    return files.digest(steady(hosts), work, versions, list(settings), steering(environ))


def steady(hosts: Sequence[Host]) -> list[object]:
    """What tells one set of hosts from another, and does not change from minute to minute as free memory does."""
    return [
        (
            host.name,
            host.cores,
            [(device.kind, device.uuid, device.name, device.memory_total_bytes) for device in host.devices],
        )
        for host in sorted(hosts, key=lambda host: host.name)
    ]


def steering(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how fast something is."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(STEERING) and not name.endswith(FOLDERS) and not any(word in name for word in TELLING)
    }


def default_root() -> Path | None:
    """Where plans and answers are kept unless the user says otherwise; None where there is no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipette-launch"
    except RuntimeError:
        return None


def machines_of(host: Host) -> str:
    """Digest what makes machines alike, whatever they are called: a batch system gives a job other ones each time.

    A processor's memory is no make, and how much of it a slot has depends on who shares it.
    """
    return files.digest(
        [(device.kind, device.name, device.kind == "cuda" and device.memory_total_bytes) for device in host.devices],
        host.cores,
    )


class Cache:
    """The folder of one key. What cannot be read or written is said once and is never fatal."""

    def __init__(self, root: Path | None, key: str) -> None:
        self.key = key
        self._root = root
        self.trouble = ""
        """Why the plan could not be kept and what to do; empty where it was, or where none is wanted."""

    def path(self, name: str) -> Path | None:
        """Where a file of this key lies; None when nothing is kept, FileFormatError where it leads out of the cache."""
        return inside(self._root, self.key, name) if self._root else None

    def load(self, hosts: Sequence[Host]) -> tuple[Plan | None, str]:
        """Return the plan of this key, or None and the reason when there is a file that cannot be used."""
        try:
            path = self.path(PLAN)
            if path is None:
                return None, ""
            plan = files.read(path, Plan)
            _check_key(plan, self.key, path)
            check_belongs(plan, hosts, str(path))
        except (FileFormatError, PlanError) as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None, ""
            return None, f"the cached plan cannot be used, so the machines are measured anew ({error})"
        return replace(plan, provenance=replace(plan.provenance, source="cached")), ""

    def measurements(self) -> Measurements | None:
        """Return what the plan of this key rests on, if it is still there."""
        return read_kept(Measurements, self._root, self.key, CLUSTER)

    def outcomes(self, host: Host) -> tuple[Outcome, ...]:
        """Return what earlier jobs on machines like this host came to, the newest last."""
        if self._root is None:
            return ()
        newest = _by_age(self._root / OUTCOMES / machines_of(host))[-MOST_OUTCOMES:]
        found = (_outcome(self._root, machines_of(host), path.name) for path in newest)
        return tuple(outcome for outcome in found if outcome is not None)

    def keep_outcome(self, outcome: Outcome, host: Host) -> str:
        """Keep an outcome beside its plan and among those of all jobs on such machines; returns why not, or nothing."""
        name = f"{outcome.key}-{files.digest(outcome.layout, list(outcome.placement))}.json"
        if outcome.features and self._root is not None:
            try:
                files.write(inside(self._root, OUTCOMES, machines_of(host), name), outcome)
            except (OSError, FileFormatError) as error:
                logger.warning("the outcome cannot be kept for later jobs: %s", error)
        return self.save(OUTCOME, outcome)

    def keep_plan(self, plan: Plan, measurements: Measurements | None = None) -> None:
        """Keep a plan, and what it rests on where that is not kept yet; where that fails, `trouble` says why."""
        self.trouble = (self.save(CLUSTER, measurements) if measurements else "") or self.save(PLAN, plan)

    @property
    def plan_path(self) -> Path | None:
        """Where the plan of this key lies; None where none was kept."""
        path = None if self.trouble else self.path(PLAN)
        return path if path is not None and path.exists() else None

    def save(self, name: str, document: files.Document) -> str:
        """Keep a document; returns why it could not be kept, or nothing."""
        try:
            path = self.path(name)
            if path is None:
                return ""
            files.write(path, document)
        except FileFormatError as error:
            return str(error)
        except OSError as error:
            return (
                f"{path} cannot be written ({error.strerror or error}): the next start will measure again; "
                f"name a writable folder with --pipette-cache, or switch the cache off with --pipette-cache off"
            )
        return ""


def _outcome(root: Path, machines: str, name: str) -> Outcome | None:
    try:
        return files.read(inside(root, OUTCOMES, machines, name), Outcome)
    except FileFormatError as error:
        logger.warning("%s", error)
        return None


def _by_age(folder: Path) -> list[Path]:
    """The documents of a folder, the oldest first; none where it cannot be read."""
    try:
        return sorted(folder.glob("*.json"), key=lambda path: (path.stat().st_mtime, path.name))
    except OSError:
        return []


def _check_key(plan: Plan, key: str, path: Path) -> None:
    if plan.provenance.key != key:
        raise PlanError(f"{path}: the plan has the key {plan.provenance.key}, its folder {key}; delete it")
