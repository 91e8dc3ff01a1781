"""Several launchers on one device, each a node of one slot, and plans written by hand for them.

NCCL refuses two ranks of one host on one GPU. So each rank gets an agent of its own, as if it were a node of its own
(`NCCL_HOSTID`), and NCCL takes its sockets between them; NCCL 2.30 and later have a switch for it besides. Where that
fails, gloo takes NCCL's place, with every tensor staged through the host (`staged`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.gpu.jobs import COMMON_WORDS, LOCAL_WORDS, DeviceKind
from benchmarks.gpu.launches import GRACE_S, OURS, ROOT, TORCHRUN, TRAINER, Launch, Run
from benchmarks.gpu.notebook import Notebook
from pipette_launch import megatron
from pipette_launch.cost.pipeline.zero_bubble import named_schedule
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Choice, Job, Layout, Plan, Provenance, files
from pipette_launch.facts.measurements import MemoryNeed
from pipette_launch.facts.schedule import ScheduleFile
from pipette_launch.probe.run import BACKENDS

STAND_IN = Path(__file__).with_name("stand_in")
ITERATIONS = 6
MODELS: dict[DeviceKind, str] = {
    "cuda": "--num-layers 8 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 --seq-length 512 "
    "--max-position-embeddings 512 --vocab-size 8192 --global-batch-size 8",
    "cpu": "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --vocab-size 256 --global-batch-size 8",
}
HOST = "gpu-check-{}"
"""Name of a node, for plans that are written before the nodes meet."""


def _need(num_stages: int) -> MemoryNeed:
    peaks = (1 << 20,) * num_stages
    return MemoryNeed(need_bytes=peaks, least_bytes=peaks, model_bytes=peaks, free_bytes=1 << 30, limit_bytes=1 << 30)


@dataclass(frozen=True, kw_only=True, slots=True)
class ByHand:
    """A plan that nobody searched for."""

    layout: Layout
    placement: tuple[int, ...]
    schedule: str = "1f1b"

    @property
    def words(self) -> str:
        """Description on one line."""
        size = self.layout.world_size
        return f"schedule {self.schedule} of {self.layout.words()} on {size} ranks, placement {list(self.placement)}"

    def plan(self, device_kind: DeviceKind, num_microbatches: int) -> Plan:
        """The plan, for nodes of one slot each."""
        size = self.layout.world_size
        chosen = Choice(
            layout=self.layout,
            placement=self.placement,
            schedule=self.schedule,
            step_time_s=1.0,
            breakdown_s={"compute": 1.0},
            memory=_need(self.layout.pp),
            bound_s=1.0,
            order=self._order(num_microbatches),
        )
        own = replace(chosen, layout=Layout(dp=size), placement=tuple(range(size)), schedule="no-pipelining")
        return Plan(
            hosts=tuple(map(HOST.format, range(size))),
            devices_per_host=1,
            device_kind=device_kind,
            chosen=chosen,
            alternatives=(),
            own=replace(own, memory=_need(1), order=None),
            keeps_own=False,
            reasons=("It was written by hand.",),
            notes=(),
            num_layouts=1,
            dropped={},
            solve_s=0.0,
            provenance=Provenance(key="by-hand", made_at="2026-11-25T00:00:00+00:00", versions={}, source="measured"),
        )

    def _order(self, num_microbatches: int) -> ScheduleFile | None:
        """Return the actions of each pipeline rank; None under Megatron's own schedules."""
        if self.schedule in ("1f1b", "interleaved-1f1b"):
            return None
        layout = self.layout
        made = named_schedule(self.schedule, pp=layout.pp, num_microbatches=num_microbatches)
        return ScheduleFile.of(made)


@dataclass(kw_only=True)
class Nodes:
    """Launchers that meet as nodes of one slot each, all on this machine."""

    book: Notebook
    folder: Path
    is_staged: bool = False
    _stock: dict[tuple[str, ...], Run] = field(default_factory=dict)
    """Runs under torchrun, by the words of the script."""

    @property
    def backend(self) -> str:
        """Name of what carries messages, for the records."""
        name = BACKENDS[self.book.kind]
        return f"gloo in the place of {name}, staged" if self.is_staged else name

    @property
    def words(self) -> list[str]:
        """Words of the trainer."""
        kind = self.book.kind
        return [*MODELS[kind].split(), *COMMON_WORDS[kind], *LOCAL_WORDS, "--train-iters", str(ITERATIONS)]

    def run(self, count: int, words: Sequence[object], *, launcher: str = OURS, limit_s: float = 0.0) -> list[Run]:
        """Run one launcher for each rank, all together; raises PipetteError if one fails."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # Gloo takes any ranks of one host, and one start of torch less saves 3 s of processor time.
        num_nodes = 1 if (launcher, self.book.kind) == (TORCHRUN, "cpu") else count
        flags = ["--nnodes", num_nodes, "--nproc-per-node", count // num_nodes, "--rdzv-backend", "c10d"]
        flags += ["--rdzv-endpoint", f"localhost:{port}"]
        flags += ["--pipette-device", self.book.kind] if launcher == OURS else []
        launches = [
            Launch(
                words=[*flags, *words],
                folder=self.folder,
                device=self.book.device,
                launcher=launcher,
                variables=apart(number) | (staging(self.book.kind) if self.is_staged else {}),
            )
            for number in range(num_nodes)
        ]
        left_s = max(self.book.left_s() - GRACE_S, 1.0)
        ends_s = time.monotonic() + min(limit_s or left_s, left_s)
        done = [launch.finish(max(ends_s - time.monotonic(), 0.0)) for launch in launches]
        failed = [one for one in done if one.code != 0]
        if failed:
            raise failed[0].failure(f"{launcher} of {count} nodes")
        return done

    def run_by_hand(self, what: ByHand) -> list[Run]:
        """Run a plan that was written by hand; raises PipetteError where the launcher trains without it."""
        job = self._job(what.layout)
        microbatches = job.batch.global_batch_size // what.layout.dp // what.layout.micro_batch_size
        path = self.folder / "by-hand.json"
        files.write(path, what.plan(self.book.kind, microbatches))
        done = self.run(what.layout.world_size, ["--pipette-plan", path, TRAINER, *self.words])
        if any("training with your own configuration" in one.err for one in done):
            raise PipetteError(f"the plan was not taken: {done[0].stderr_end}")
        return done

    def beside_torchrun(self, layout: Layout, ours: Sequence[Run]) -> dict[str, object]:
        """Losses and steps of both launchers with one layout; torchrun has its ranks in the order of the nodes."""
        count = layout.world_size
        written = megatron.write_arguments(self.words, job=self._job(layout), layout=layout)
        if written not in self._stock:
            done = self.run(count, [TRAINER, *written], launcher=TORCHRUN)
            self._stock[written] = _who_printed(done)
        mine, theirs = _who_printed(ours), self._stock[written]
        return {
            "losses": list(mine.losses.values()),
            "torchrun_losses": list(theirs.losses.values()),
            "steps_s": [one.step_time_s for one in mine.iterations],
            "torchrun_steps_s": [one.step_time_s for one in theirs.iterations],
            "seconds": max(run.seconds for run in ours),
        }

    def _job(self, layout: Layout) -> Job:
        return megatron.read_job(
            self.words, world_size=layout.world_size, megatron_version="0.16.1", device_kind=self.book.kind
        )


def _who_printed(runs: Sequence[Run]) -> Run:
    """The node whose rank prints the losses."""
    return next((run for run in runs if run.iterations), runs[0])


def apart(number: int) -> dict[str, str]:
    """Variables that make NCCL take this agent's workers for another host's, whom it reaches by sockets."""
    return {
        "SLURMD_NODENAME": HOST.format(number),
        "NCCL_HOSTID": f"pipette-{number}",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_DEBUG": "WARN",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def staging(device_kind: DeviceKind) -> dict[str, str]:
    """Variables that put `staged` in the backend's place in every process of a job."""
    path = os.pathsep.join(map(str, (STAND_IN, ROOT, ROOT / "patches")))
    return {"PIPETTE_STAGED": BACKENDS[device_kind], "PYTHONPATH": path}
