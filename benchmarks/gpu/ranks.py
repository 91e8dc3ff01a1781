"""Several ranks on one device: a warm-up, a plan, a placement and a training of two and four ranks.

NCCL refuses two ranks of one host on one GPU. So each rank gets an agent of its own, as if it were a node of its own
(`NCCL_HOSTID`), and NCCL takes its sockets between them; NCCL 2.30 and later have a switch for it besides. Where that
fails, gloo takes NCCL's place, with every tensor staged through the host (`staged`). What this does not show: NVLink,
PCIe and InfiniBand, any bandwidth, ranks that share a node, and memory of one rank by NVML, which sees all ranks.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.gpu.launches import GRACE_S, OURS, ROOT, TORCHRUN, TRAINER, Launch, Run, newest_cached
from benchmarks.gpu.main_job import COMMON, step_s
from benchmarks.gpu.notebook import Notebook, Record, of_kind
from benchmarks.gpu.shapes import DeviceKind
from pipette_launch import megatron
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Choice, Layout, Measurements, Plan, files
from pipette_launch.probe.run import BACKENDS
from pipette_launch.units import rate_text, seconds_text

RING = Path(__file__).with_name("ring.py")
STAND_IN = Path(__file__).with_name("stand_in")
ITERATIONS = 6
MODELS: dict[DeviceKind, str] = {
    "cuda": "--num-layers 4 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 --seq-length 512 "
    "--max-position-embeddings 512 --vocab-size 8192 --global-batch-size 8",
    "cpu": "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --vocab-size 256 --global-batch-size 8",
}
BUDGET_S = {"cuda": 20, "cpu": 6}
RING_S = 45.0
NEEDED_S = {"cuda": 20.0, "cpu": 8.0}
PLACED = Layout(pp=2, dp=2)
PLACEMENT = (2, 0, 3, 1)
"""Slot i has this rank: no slot has its own number."""


@dataclass(kw_only=True)
class Nodes:
    """Launchers that meet as nodes of one slot each, all on this machine."""

    book: Notebook
    folder: Path
    is_staged: bool = False

    @property
    def backend(self) -> str:
        """What carries messages, for the records."""
        return (
            f"gloo in the place of {BACKENDS[self.book.kind]}, staged" if self.is_staged else BACKENDS[self.book.kind]
        )

    def run(self, count: int, words: Sequence[object], *, launcher: str = OURS, limit_s: float = 0.0) -> list[Run]:
        """Run them together; raises PipetteError where one fails."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        flags = ["--nnodes", count, "--nproc-per-node", 1, "--rdzv-backend", "c10d"]
        flags += ["--rdzv-endpoint", f"localhost:{port}"]
        flags += ["--pipette-device", self.book.kind] if launcher == OURS else []
        launches = [
            Launch(
                words=[*flags, *words],
                folder=self.folder,
                device=self.book.device,
                launcher=launcher,
                variables=_apart(number) | (_staging(self.book.kind) if self.is_staged else {}),
            )
            for number in range(count)
        ]
        left_s = max(self.book.left_s() - GRACE_S, 1.0)
        ends_s = time.monotonic() + min(limit_s or left_s, left_s)
        done = [launch.finish(max(ends_s - time.monotonic(), 0.0)) for launch in launches]
        failed = [one for one in done if one.code != 0]
        if failed:
            raise failed[0].failure(f"{launcher} of {count} nodes")
        return done


def _apart(number: int) -> dict[str, str]:
    """Variables that make NCCL take this agent's workers for another host's, whom it reaches by sockets."""
    return {
        "NCCL_HOSTID": f"pipette-{number}",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_DEBUG": "WARN",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _staging(device_kind: DeviceKind) -> dict[str, str]:
    """Variables that put `staged` in the backend's place in every process of a job."""
    path = os.pathsep.join(map(str, (STAND_IN, ROOT, ROOT / "patches")))
    return {"PIPETTE_STAGED": BACKENDS[device_kind], "PYTHONPATH": path}


def measure(book: Notebook) -> None:
    """See whether the backend takes several ranks on this device; if so, run the main job on two and on four."""
    with tempfile.TemporaryDirectory() as name:
        nodes = Nodes(book=book, folder=Path(name))
        needed_s = NEEDED_S[book.kind]
        for count in (2, 4):
            if not _meets(nodes, count):
                # The ranks of a device that NCCL refuses still have all else to show.
                nodes.is_staged = True
                if not _meets(nodes, count):
                    return
        book.attempt("warm-up, plan and training of 2 ranks", partial(_job, nodes, 2), needs_s=2 * needed_s)
        book.attempt("a placement of 4 ranks", partial(_placed, nodes), needs_s=2 * needed_s)
        if book.kind == "cuda":
            # A CPU has shown with two that it runs.
            book.attempt("warm-up, plan and training of 4 ranks", partial(_job, nodes, 4), needs_s=2 * needed_s)
        else:
            # What a GPU may need must not rot where gloo does without.
            nodes.is_staged = True
            _meets(nodes, 2)


def _meets(nodes: Nodes, count: int) -> bool:
    return nodes.book.attempt(f"a ring of {count} ranks by {nodes.backend}", partial(_ring, nodes, count), needs_s=5.0)


def _ring(nodes: Nodes, count: int) -> None:
    done = nodes.run(count, [RING, nodes.book.kind], launcher=TORCHRUN, limit_s=RING_S)
    nodes.book.add("ring", ranks=count, backend=nodes.backend, seconds=max(one.seconds for one in done))


def _words(nodes: Nodes) -> list[str]:
    return [*MODELS[nodes.book.kind].split(), *COMMON.split(), "--train-iters", str(ITERATIONS)]


def _job(nodes: Nodes, count: int) -> None:
    """Measure, plan and train, then the same layout under torchrun: the losses must be the same."""
    words = _words(nodes)
    ours = nodes.run(count, ["--pipette-budget", BUDGET_S[nodes.book.kind], TRAINER, *words])
    plan = newest_cached(nodes.folder, Plan, "plan.json")
    cluster = newest_cached(nodes.folder, Measurements, "cluster.json")
    links = cluster.cluster.between_hosts
    rates = [rate for row in links.bandwidth_bytes_per_s for rate in row if 0 < rate < float("inf")]
    latencies = [latency for row in links.latency_s for latency in row if latency > 0]
    nodes.book.add(
        "job",
        ranks=count,
        backend=nodes.backend,
        chosen=plan.chosen.layout.words(),
        placement=list(plan.chosen.placement),
        predicted_s=plan.chosen.step_time_s,
        phase_s=cluster.phase_s,
        link_bytes_per_s=[min(rates), max(rates)] if rates else [],
        link_latency_s=[min(latencies), max(latencies)] if latencies else [],
        notes=list(cluster.notes),
        **_beside_torchrun(nodes, count, plan.chosen.layout, ours),
    )


def _placed(nodes: Nodes) -> None:
    """Run a plan that was written by hand and gives every slot another rank."""
    first = newest_cached(nodes.folder, Plan, "plan.json")
    size = PLACED.world_size
    name = first.hosts[0].rpartition("#")[0] or first.hosts[0]
    chosen = Choice(
        layout=PLACED,
        placement=PLACEMENT,
        schedule="1f1b",
        step_time_s=1.0,
        breakdown_s={"compute": 1.0},
        peak_memory_bytes=(1 << 20,) * PLACED.pp,
        memory_limit_bytes=1 << 30,
        bound_s=1.0,
    )
    plan = replace(
        first,
        hosts=tuple(f"{name}#{number + 1}" for number in range(size)),
        devices_per_host=1,
        chosen=chosen,
        alternatives=(),
        own=replace(chosen, layout=Layout(dp=size), placement=tuple(range(size)), peak_memory_bytes=(1 << 20,)),
    )
    path = nodes.folder / "placed.json"
    files.write(path, plan)
    ours = nodes.run(size, ["--pipette-plan", path, TRAINER, *_words(nodes)])
    if any("training with your own configuration" in one.err for one in ours):
        raise PipetteError(f"the plan was not taken: {ours[0].stderr_end}")
    nodes.book.add(
        "placed",
        ranks=size,
        backend=nodes.backend,
        chosen=PLACED.words(),
        placement=list(PLACEMENT),
        **_beside_torchrun(nodes, size, PLACED, ours),
    )


def _beside_torchrun(nodes: Nodes, count: int, layout: Layout, ours: Sequence[Run]) -> dict[str, object]:
    """Losses and steps of the same layout under both launchers; torchrun's has its ranks in the order of the nodes."""
    words = _words(nodes)
    job = megatron.read_job(words, world_size=count, megatron_version="0.16.1", device_kind=nodes.book.kind)
    written = megatron.write_arguments(words, job=job, layout=layout)
    stock = nodes.run(count, [TRAINER, *written], launcher=TORCHRUN)
    mine, theirs = (next((run for run in runs if run.iterations), runs[0]) for runs in (ours, stock))
    return {
        "losses": list(mine.losses.values()),
        "torchrun_losses": list(theirs.losses.values()),
        "steps_s": [one.step_time_s for one in mine.iterations],
        "torchrun_steps_s": [one.step_time_s for one in theirs.iterations],
        "seconds": max(run.seconds for run in ours),
    }


def lines(records: Sequence[Record]) -> Iterator[str]:
    """A sentence for each ring and each job, and what all of it does not show."""
    yield " ".join((__doc__ or "").split("\n\n")[1].split())
    yield ""
    for one in of_kind(records, "ring"):
        yield (
            f"{one['ranks']} ranks met, sent around the ring, reduced and gathered by {one['backend']} in "
            f"{one['seconds']:.1f} s."
        )
    for one in [*of_kind(records, "job"), *of_kind(records, "placed")]:
        same = sum(mine == theirs for mine, theirs in zip(one["losses"], one["torchrun_losses"], strict=False))
        yield (
            f"{one['ranks']} ranks by {one['backend']}, {one['chosen']}, placement {one['placement']}: {same} of "
            f"{len(one['torchrun_losses'])} losses are torchrun's to the digit; {one['seconds']:.1f} s in all, a step "
            f"{seconds_text(step_s(one))}."
        )
        if "phase_s" in one:
            phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in one["phase_s"].items())
            yield f"Its warm-up, seconds by phase: {phases}."
            yield from (f"It noted: {note}" for note in one["notes"])
        if one.get("link_bytes_per_s"):
            rates, latencies = one["link_bytes_per_s"], one["link_latency_s"]
            yield (
                f"Links as it measured them: {rate_text(rates[0])} to {rate_text(rates[1])}, "
                f"{seconds_text(latencies[0])} to {seconds_text(latencies[1])}."
            )
