"""Plans, predictions and measurements for the report's golden screens."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from facts_for_tests import memory_need, tiny_cluster, tiny_measurements

from pipette_launch.facts import (
    Choice,
    Cluster,
    ComputeCase,
    Layout,
    Links,
    Measurements,
    Plan,
    Provenance,
    Samples,
    Setting,
)
from pipette_launch.facts.health import Verdict
from pipette_launch.facts.measurements import CollectiveTime, MemoryNeed, MemoryReading
from pipette_launch.facts.plan import Rate, Trial, Trials
from pipette_launch.facts.prediction import PARTS, Prediction, StageMemory
from pipette_launch.report.measured import measured_screen
from pipette_launch.report.plan import plan_file_screen, plan_screen
from pipette_launch.report.prediction import prediction_screen
from pipette_launch.text import GIB

OLD = (
    "--tensor-model-parallel-size", "1", "--num-layers", "24", "--micro-batch-size=1", "--bf16",
    "--recompute-activations", "--lr", "1e-4",
)  # fmt: skip
NEW = (
    "--tensor-model-parallel-size", "2", "--num-layers", "24", "--micro-batch-size", "4", "--bf16", "--lr", "1e-4",
    "--pipeline-model-parallel-size", "2", "--use-distributed-optimizer", "--global-batch-size", "64",
)  # fmt: skip
RATE = Rate(tokens_per_s=148_208, flops_per_s=479e12, mfu=0.4846)
SAVED_TO = Path("/home/user/.cache/pipette-launch/8f14e45fceea167a/plan.json")


def choice(layout: Layout, step_time_s: float, **changes: object) -> Choice:
    """A choice in torchrun's order, with round figures."""
    parts = {"compute": 0.75, "bubble": 0.125, "tensor_parallel": 0.1, "data_parallel": 0.023, "optimizer": 0.002}
    made = Choice(
        layout=layout,
        placement=tuple(range(layout.world_size)),
        schedule="1f1b" if layout.pp > 1 else "no-pipelining",
        step_time_s=step_time_s,
        breakdown_s={name: part * step_time_s for name, part in parts.items()},
        memory=shown_need(tuple(max((6 << 30) - (stage << 29), 1 << 29) for stage in range(layout.pp))),
        bound_s=0.9 * step_time_s,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def shown_need(peaks_bytes: tuple[int, ...], limit_bytes: int = 7 << 30) -> MemoryNeed:
    """A need of these bytes, with a margin of 8 %."""
    return memory_need(peaks_bytes, limit_bytes, round(limit_bytes / 0.92))


def plan(cluster: Cluster, chosen: Choice, own: Choice, *alternatives: Choice, **changes: object) -> Plan:
    """A plan with a reason, two notes of its own and two that are only counted."""
    made = Plan(
        hosts=tuple(host.name for host in cluster.hosts),
        devices_per_host=cluster.devices_per_host,
        device_kind=cluster.device_kind,
        chosen=chosen,
        alternatives=alternatives,
        own=own,
        keeps_own=chosen == own,
        reasons=(
            "tp2 pp2 dp2 mbs4 dist-opt takes 62.8 ms a step, 13.9% less than tp1 pp1 dp8 mbs1, the user's own.",
            "It saves most on gradient reduction: 5.97 ms in place of 17.7 ms.",
        ),
        notes=("No collective was measured; collectives are priced as rings over single links.",),
        num_layouts=141,
        dropped={"interleaving needs at least pp micro-batches": 9, "pp*vpp does not divide num_layers=24": 4},
        solve_s=0.4,
        provenance=Provenance(key="8f14e45fceea167a", made_at="2026-11-21T09:30:00Z", versions={}, source="measured"),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def changed() -> str:
    """Four hosts of two, another layout and another placement than the user's."""
    cluster = tiny_cluster(4, 2)
    speeds = tuple(
        tuple(0.0 if i == j else 1.25e7 if {i, j} == {0, 3} else 1e8 + 1e6 * i for j in range(4)) for i in range(4)
    )
    cluster = replace(
        cluster,
        between_hosts=Links(latency_s=cluster.between_hosts.latency_s, bandwidth_bytes_per_s=speeds),
        slot_speed=(1.0,) * 5 + (0.84,) + (1.0,) * 2,
    )
    slow = Verdict(
        kind="slow-device",
        host="node2",
        device="GPU-8f14e45f",
        figure="takes 7.14 ms for the same layer, 0.84 of its peers' speed",
        peers="take 6 ms",
        advice="start without it (sbatch --exclude=node2)",
    )
    # Eight devices of a hot host share a line; of eight notes those beyond the fifth line are counted.
    hot = [
        replace(
            slow,
            kind="throttled",
            host="node1",
            device=f"GPU-{device}",
            figure="its clock is held down",
            peers="",
            advice="",
        )
        for device in range(8)
    ]
    notes = [
        Verdict(kind="pcie", host=f"node{host}", figure="uses 8 of the 16 lanes of its slot", is_sick=False)
        for host in range(8)
    ]
    measurements = replace(
        tiny_measurements(cluster), phase_s={"links": 3.5, "compute": 8.75}, verdicts=(*notes, slow, *hot)
    )
    made = plan(
        cluster,
        choice(
            Layout(tp=2, pp=2, dp=2, micro_batch_size=4, use_distributed_optimizer=True),
            0.0628,
            placement=(4, 5, 0, 1, 2, 3, 7, 6),
        ),
        choice(Layout(dp=8), 0.0729),
        choice(Layout(tp=2, dp=4, micro_batch_size=2), 0.0634),
        choice(Layout(tp=2, pp=4, dp=1, micro_batch_size=2), 0.0641),
    )
    return shown(replace(made, trials=trials(made)), measurements, new_arguments=NEW)


def trials(made: Plan) -> Trials:
    """The user's own configuration, the chosen plan, which won, and one that ran out of memory."""
    tried: list[tuple[Choice, tuple[float, ...]]] = [
        (made.own, (0.081, 0.08, 0.083)),
        (made.chosen, (0.066, 0.065, 0.07)),
        (made.alternatives[0], ()),
    ]
    runs = [
        Trial(
            layout=one.layout,
            placement=one.placement,
            is_own=one is made.own,
            predicted_step_s=one.step_time_s,
            step=Samples(values_s=values_s) if values_s else None,
            failure="" if values_s else "rank 3 ended with exit code 1: out of memory: NCCL's buffers",
            took_s=41.0,
        )
        for one, values_s in tried
    ]
    return Trials(asked=2, iterations=3, runs=tuple(runs))


def kept() -> str:
    """One host, the user's own configuration, from the cache."""
    cluster = tiny_cluster(1, 2)
    own = choice(Layout(pp=2), 1.5)
    made = plan(
        cluster,
        own,
        own,
        choice(Layout(dp=2), 1.49),
        reasons=("The user's own configuration stays.",),
        notes=(),
        dropped={},
        provenance=Provenance(key="8f14e45fceea167a", made_at="2026-11-21T09:30:00Z", versions={}, source="cached"),
    )
    return shown(made, None, new_arguments=None, saved_to=None)


def large() -> str:
    """Sixty-four hosts of eight, sixteen stages, the hosts in reverse."""
    cluster = tiny_cluster(64, 8, memory_bytes=80 << 30)
    layout = Layout(tp=8, etp=8, pp=16, dp=4, vpp=2, sequence_parallel=True, use_distributed_optimizer=True)
    placement = tuple(8 * (63 - host) + device for host in range(64) for device in range(8))
    peaks = tuple((70 << 30) - (abs(stage - 9) << 30) for stage in range(16))
    own = choice(Layout(tp=8, etp=8, pp=8, dp=8), 2.5, memory=shown_need((90 << 30,) * 8, 73 << 30))
    made = plan(
        cluster,
        choice(layout, 1.9, placement=placement, memory=shown_need(peaks, 73 << 30)),
        own,
    )
    return shown(made, tiny_measurements(cluster), new_arguments=NEW)


def planned(*, is_whole: bool = True) -> str:
    """Sixteen imagined hosts, another layout than the user's, more reasons than fit, and flags to paste."""
    cluster = tiny_cluster(16, 8, memory_bytes=80 << 30)
    setting = Setting(
        script="pretrain_gpt.py",
        arguments=OLD,
        new_arguments=NEW,
        num_parameters=69_000_000_000,
        global_batch_size=1024,
        seq_length=4096,
        device_name="H100-SXM",
        device_memory_bytes=80 << 30,
        machines="not measured: from the device's data sheet and usual shares of it",
        network="leaf of 16 hosts 47 GB/s, core 28.2 GB/s",
    )
    made = plan(
        cluster,
        choice(Layout(tp=2, pp=8, dp=8, micro_batch_size=4, use_distributed_optimizer=True), 28.3, rate=RATE),
        choice(Layout(tp=8, etp=8, pp=4, dp=4), 33.9),
        choice(Layout(tp=4, etp=4, pp=8, dp=4, micro_batch_size=2), 28.9),
        device_kind="cuda",
        setting=setting,
        dropped={f"reason number {number}": 10 - number for number in range(7)},
        provenance=Provenance(key="8f14e45fceea167a", made_at="2026-11-21T09:30:00Z", versions={}, source="imagined"),
    )
    return plan_file_screen(made, title="pipette plan", saved_to=SAVED_TO, is_whole=is_whole)


def spared() -> str:
    """A mixture of experts on eight hosts, two of which stand by; plans for the loss of one to four, pins, a batch."""
    cluster = tiny_cluster(6, 8, memory_bytes=80 << 30)
    layout = Layout(tp=4, pp=2, dp=6, ep=2, etp=4, sequence_parallel=True, use_distributed_optimizer=True)
    own = choice(Layout(tp=8, etp=8, dp=6), 3.1)
    smaller = tuple(
        plan(
            tiny_cluster(hosts, 8), choice(Layout(tp=4, etp=4, pp=2, dp=hosts), step_s), choice(Layout(dp=8 * hosts), 9)
        )
        for hosts, step_s in ((5, 2.9), (4, 3.6), (3, 4.8), (2, 7.1))
    )
    made = plan(
        cluster,
        choice(layout, 2.4, placement=tuple(reversed(range(48))), rate=RATE),
        own,
        choice(replace(layout, micro_batch_size=2), 2.5),
        choice(replace(layout, ep=1), 2.6),
        choice(replace(layout, ep=1, micro_batch_size=2), 2.7),
        templates=smaller,
        other_hosts=("spare0", "spare1"),
        reasons=tuple(f"Reason number {number} takes a whole line of a screen of 100 columns." for number in range(6)),
        advice=(
            "--moe-router-load-balancing-type sinkhorn balances within a micro-batch: the micro-batch size stays",
            "--save is not given: after the loss of a host the job starts over from iteration 0",
        ),
        notes=tuple(f"links: assumption {number} that nobody can change" for number in range(9)),
    )
    flags = [word for number in range(14) for word in (f"--flag-number-{number}", str(number))]
    return shown(made, tiny_measurements(cluster), new_arguments=(*NEW, *flags))


def small() -> str:
    """Three processes on one host's CPUs; the user's own configuration stays."""
    cluster = tiny_cluster(1, 3)
    own = choice(Layout(dp=3), 0.05, rate=RATE)
    made = plan(cluster, own, own, choice(Layout(pp=3), 0.052), notes=("3 slots share the 2 cores of node0.",))
    return shown(made, tiny_measurements(cluster), new_arguments=None)


def shown(
    made: Plan,
    measurements: Measurements | None,
    *,
    new_arguments: tuple[str, ...] | None,
    saved_to: Path | None = SAVED_TO,
    unsaved: str = "",
) -> str:
    """The screen of a plan."""
    return plan_screen(
        made,
        measurements,
        arguments=OLD,
        new_arguments=new_arguments,
        saved_to=saved_to,
        unsaved=unsaved,
    )


def stage_memory(pp_rank: int, peak_gib: float) -> StageMemory:
    """A stage whose parts have round shares; the last of eight and of thirty-two has logits."""
    shares = (0.2, 0.3, 0.1, 0.3, 0.05 if pp_rank in (3, 31) else 0.0, 0.01)
    peak = int(peak_gib * GIB)
    sizes = [int(share * peak) for share in shares]
    parts = dict(zip(PARTS, (*sizes, peak - sum(sizes)), strict=True))
    return StageMemory(
        pp_rank=pp_rank,
        num_layers=6,
        parts_bytes=parts,
        model_peak_bytes=sum(sizes),
        peak_bytes=peak,
        least_bytes=int(0.97 * peak),
    )


def prediction(**changes: object) -> Prediction:
    """Four stages on sixteen hosts that nobody measured; it fits."""
    made = Prediction(
        script="pretrain_gpt.py",
        layout=Layout(tp=8, etp=8, pp=4, dp=4, sequence_parallel=True, use_distributed_optimizer=True),
        schedule="1f1b",
        world_size=128,
        num_hosts=16,
        devices_per_host=8,
        device_kind="cuda",
        device_name="H100-SXM",
        machines="not measured: from the device's data sheet and usual shares of it",
        global_batch_size=1024,
        num_microbatches=256,
        num_parameters=69_000_000_000,
        tokens_per_step=1024 * 4096,
        stages=tuple(stage_memory(rank, 60 - 5 * rank) for rank in range(4)),
        capacity_bytes=80 * GIB,
        limit_bytes=int(0.92 * 80 * GIB),
        memory_margin=0.08,
        fits=True,
        verdict="fits",
        step_time_s=34.05,
        breakdown_s={"compute": 23.0, "tensor_parallel": 9.9, "bubble": 1.1, "optimizer": 0.05},
        notes=("Context: 477 MiB, default: a CUDA context takes 300 to 500 MB.",),
        megatron_version="0.16.1",
        rate=replace(RATE, tokens_per_s=123_181, flops_per_s=398.7e12, mfu=0.4031),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def foretold() -> str:
    """A configuration that fits."""
    return prediction_screen(prediction())


def too_large() -> str:
    """Thirty-two stages, the ninth of which is too large."""
    stages = tuple(stage_memory(rank, 85 - abs(rank - 9)) for rank in range(32))
    layout = Layout(tp=8, etp=8, pp=32, vpp=3, dp=4, sequence_parallel=True)
    made = prediction(
        stages=stages, layout=layout, schedule="interleaved-1f1b", fits=False, verdict="too large", world_size=1024
    )
    return prediction_screen(made)


def tight() -> str:
    """Four stages, whose third is above the device's memory only with the allocator's cache."""
    stages = tuple(stage_memory(rank, size) for rank, size in enumerate((74, 73, 82, 71)))
    return prediction_screen(
        prediction(stages=stages, fits=False, verdict="tight", expandable_peak_bytes=int(80.6 * GIB))
    )


def memory_only() -> str:
    """One stage, and nothing known of the machines."""
    made = prediction(
        stages=(stage_memory(2, 50),),
        capacity_bytes=None,
        limit_bytes=None,
        fits=None,
        verdict="unknown",
        step_time_s=None,
        breakdown_s={},
        rate=None,
        device_name="",
        machines="unknown",
        num_microbatches=1,
        notes=("No step time: nothing is known of the machines; name a device with --gpu or --cluster.",),
    )
    return prediction_screen(made)


def measured() -> str:
    """Three hosts of two with one slow link and one slow slot, and what was timed on them."""
    cluster = tiny_cluster(3, 2)
    rates = tuple(
        tuple(0.0 if i == j else 1.25e7 if {i, j} == {0, 2} else 1e8 + 1e6 * i for j in range(3)) for i in range(3)
    )
    cluster = replace(
        cluster,
        between_hosts=Links(latency_s=cluster.between_hosts.latency_s, bandwidth_bytes_per_s=rates),
        slot_speed=(1.0,) * 5 + (0.84,),
    )
    groups = [
        CollectiveTime(
            kind="all_reduce", slots=slots, latency_s=2e-3, seconds_per_byte=4e-8, spread=0.02, sizes_bytes=(8, 4096)
        )
        for slots in ((0, 2, 4), (0, 1))
    ]
    case = ComputeCase(tp=1, cp=1, micro_batch_size=1)
    found = replace(
        tiny_measurements(cluster),
        collectives=tuple(groups),
        memory=(MemoryReading(case=case, slot=0, allocator_peak_bytes=5 << 20, device_peak_bytes=9 << 20),),
        phase_s={"start": 4.1, "compute": 6.0, "links": 3.2},
        notes=("links: 1 of 6 scatter by more than 10%, most of all node0:0 -> node2:0 (12.5 MB/s +- 30%)",),
    )
    return measured_screen(found, title="pipette report", saved_to=Path("cluster.json"))


def planned_now() -> str:
    """The same as `pipette plan` shows it."""
    return planned(is_whole=False)


SCREENS = {
    "measured": measured,
    "changed": changed,
    "kept": kept,
    "large": large,
    "spared": spared,
    "small": small,
    "planned": planned,
    "planned-now": planned_now,
    "foretold": foretold,
    "too-large": too_large,
    "tight": tight,
    "memory-only": memory_only,
}
"""Golden files lie in `tests/data/screens`, as NAME-WIDTH.txt."""


def at_width(width: int) -> AbstractContextManager[object]:
    """Draw all screens of the block with this width."""
    return patch.multiple("pipette_launch.report.screen", LEAST_WIDTH=width, MOST_WIDTH=width)


def drawn(name: str, width: int) -> str:
    """A screen of `SCREENS` at this width."""
    with at_width(width):
        return SCREENS[name]()
