"""Several ranks on one device: messages, warm-up, plan, placement, schedules and training.

Each rank has an agent of its own (`nodes`). What this does not show: NVLink, PCIe and InfiniBand, NVLS, any bandwidth,
ranks that share a node, several devices of one host, and memory of one rank by NVML, which sees all ranks.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu.jobs import DeviceKind
from benchmarks.gpu.launches import TORCHRUN, TRAINER, losses_apart, newest_cached
from benchmarks.gpu.main_job import step_s
from benchmarks.gpu.nodes import ByHand, Nodes
from benchmarks.gpu.notebook import Notebook, Record, of_kind
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Layout, Measurements, Plan
from pipette_launch.text import rate_text, seconds_text

RING = Path(__file__).with_name("ring.py")
BUDGET_S = {"cuda": 20, "cpu": 6}
RING_S = {"cuda": 60.0, "cpu": 300.0}
NEEDED_S = 20.0
"""Less time is not enough for one more start on a GPU."""
TOLERANCE = 1e-3
"""Largest relative difference between losses of two orders of the same sums."""
# Folded schedules draw other initial weights than torchrun, so their losses cannot be compared.
BY_HAND: dict[DeviceKind, tuple[ByHand, ...]] = {
    "cuda": (
        ByHand(layout=Layout(pp=2), placement=(0, 1), schedule="zb-1p"),
        # Slot i has rank placement[i]: no slot has its own number.
        ByHand(layout=Layout(pp=2, dp=2), placement=(2, 0, 3, 1)),
        ByHand(layout=Layout(pp=4), placement=(0, 1, 2, 3), schedule="zb-1p"),
    ),
    # Placement and schedule in one start: each start on a CPU takes 13 s of processor time.
    "cpu": (
        ByHand(layout=Layout(pp=2), placement=(1, 0), schedule="zb-1p"),
        ByHand(layout=Layout(pp=2, vpp=2), placement=(1, 0)),
    ),
}


def measure(book: Notebook) -> None:
    """Check whether the backend takes several ranks on this device; if so, train on them in several ways."""
    with tempfile.TemporaryDirectory() as name:
        nodes = Nodes(book=book, folder=Path(name))
        # The jobs below show gloo itself; this shows that its copies on the host still work, which a GPU may need.
        nodes.is_staged = book.kind == "cpu"
        for count in (2,) if book.kind == "cpu" else (2, 4):
            if not meets(nodes, count):
                # A device whose ranks NCCL refuses still has all else to show.
                nodes.is_staged = True
                if not meets(nodes, count):
                    return
        nodes.is_staged = nodes.is_staged and book.kind == "cuda"
        book.attempt("warm-up, plan and training of 2 ranks", partial(_job, nodes, 2), needs_s=2 * NEEDED_S)
        for one in BY_HAND[book.kind]:
            book.attempt(one.words, partial(by_hand, nodes, one), needs_s=2 * NEEDED_S)
            # A CPU takes the first plan over gloo itself, and the next ones over its copies on the host.
            nodes.is_staged = nodes.is_staged or book.kind == "cpu"
        if book.kind == "cuda":
            book.attempt("warm-up, plan and training of 4 ranks", partial(_job, nodes, 4), needs_s=2 * NEEDED_S)


def meets(nodes: Nodes, count: int) -> bool:
    """Let ranks exchange messages; returns whether they did."""
    return nodes.book.attempt(f"a ring of {count} ranks by {nodes.backend}", partial(_ring, nodes, count), needs_s=5.0)


def _ring(nodes: Nodes, count: int) -> None:
    kind = nodes.book.kind
    done = nodes.run(count, [RING, kind], launcher=TORCHRUN, limit_s=RING_S[kind])
    answers = [json.loads(line) for one in done for line in one.out.splitlines() if line.startswith("{")]
    if sorted(one["rank"] for one in answers) != list(range(count)):
        raise PipetteError(f"{len(answers)} of {count} ranks answered: {done[0].stderr_end}")
    nodes.book.add(
        "ring", ranks=count, backend=nodes.backend, seconds=max(one.seconds for one in done), answers=answers
    )


def _job(nodes: Nodes, count: int) -> None:
    """Measure, plan and train, then the same layout under torchrun: the losses must be the same."""
    ours = nodes.run(count, ["--pipette-budget", BUDGET_S[nodes.book.kind], TRAINER, *nodes.words])
    plan = newest_cached(nodes.folder, Plan, "plan.json")
    cluster = newest_cached(nodes.folder, Measurements, "cluster.json")
    links = cluster.cluster.between_hosts
    rates = [rate for row in links.bandwidth_bytes_per_s for rate in row if 0 < rate < float("inf")]
    latencies = [latency for row in links.latency_s for latency in row if latency > 0]
    beside = nodes.beside_torchrun(plan.chosen.layout, ours)
    nodes.book.add(
        "job",
        ranks=count,
        backend=nodes.backend,
        chosen=plan.chosen.layout.words(),
        schedule=plan.chosen.schedule,
        placement=list(plan.chosen.placement),
        predicted_s=plan.chosen.step_time_s,
        phase_s=cluster.phase_s,
        link_bytes_per_s=[min(rates), max(rates)] if rates else [],
        link_latency_s=[min(latencies), max(latencies)] if latencies else [],
        notes=list(cluster.notes),
        **beside,
    )
    _compare(nodes, f"training of {count} ranks by plan", beside)


def by_hand(nodes: Nodes, what: ByHand) -> None:
    """Run a plan by hand, then the same layout under torchrun and Megatron's own schedule."""
    ours = nodes.run_by_hand(what)
    beside = nodes.beside_torchrun(what.layout, ours)
    nodes.book.add(
        "by hand",
        ranks=what.layout.world_size,
        backend=nodes.backend,
        chosen=what.layout.words(),
        schedule=what.schedule,
        placement=list(what.placement),
        **beside,
    )
    _compare(nodes, what.words, beside)


def _compare(nodes: Nodes, what: str, beside: Record) -> None:
    """Let the part fail if losses differ by more than the order of sums explains."""
    apart = losses_apart(beside["losses"], beside["torchrun_losses"])
    if apart > TOLERANCE:
        nodes.book.fail(what, f"its losses are up to {apart:.1e} apart from those under torchrun")


def lines(records: Sequence[Record]) -> Iterator[str]:
    """A sentence for each ring and each job, and what all of it does not show."""
    yield " ".join((__doc__ or "").split("\n\n")[1].split())
    yield ""
    for one in of_kind(records, "ring"):
        yield (
            f"{one['ranks']} ranks met, sent messages around the ring and reduced by {one['backend']} in "
            f"{one['seconds']:.1f} s."
        )
    for one in [*of_kind(records, "job"), *of_kind(records, "by hand")]:
        same = sum(mine == theirs for mine, theirs in zip(one["losses"], one["torchrun_losses"], strict=False))
        apart = losses_apart(one["losses"], one["torchrun_losses"])
        yield (
            f"{one['ranks']} ranks by {one['backend']}, {one['chosen']}, schedule {one['schedule']}, placement "
            f"{one['placement']}: {same} of {len(one['torchrun_losses'])} losses are torchrun's to the digit"
            f"{f', at most {apart:.1e} apart' if apart else ''}; {one['seconds']:.1f} s in all, a step "
            f"{seconds_text(step_s(one))}, under torchrun {seconds_text(step_s({'steps_s': one['torchrun_steps_s']}))}."
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
