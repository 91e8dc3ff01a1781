"""Plans with everything that a report draws, for the tests of its page."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from facts_for_tests import tiny_job, tiny_measurements
from search.worlds import planned, two_racks

from pipette_launch.facts import Choice, Host, Job, Layout, Measurements, Plan, Samples
from pipette_launch.facts.health import Verdict
from pipette_launch.facts.job import Batch
from pipette_launch.facts.outcome import Outcome, PeakReading
from pipette_launch.facts.plan import Setting, Trial, Trials
from pipette_launch.planning.picture import Picture, picture_of
from pipette_launch.report.page.page import plan_page

BEFORE = ("--num-layers", "4", "--micro-batch-size", "1")
AFTER = ("--num-layers", "4", "--micro-batch-size", "2", "--pipeline-model-parallel-size", "4")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A page and what it was made of."""

    job: Job
    measurements: Measurements
    plan: Plan
    picture: Picture
    outcome: Outcome

    @property
    def html(self) -> str:
        """The page."""
        return plan_page(self.plan, self.measurements, self.picture, self.outcome)


@cache
def drawn() -> Drawn:
    """A pipeline over two racks whose ranks do not stand in torchrun's order, with a sick link, a trial and a run."""
    sick = Verdict(kind="slow-link", host="node0", other_host="node1", figure="10 MB/s", peers="1 GB/s")
    measurements = replace(tiny_measurements(two_racks()), verdicts=(sick,))
    job = tiny_job(4, batch=Batch(global_batch_size=16))
    made = planned(job, measurements)
    made = replace(
        made,
        chosen=_with_near_limit(made.chosen),
        alternatives=tuple(map(_with_near_limit, made.alternatives)),
        own=_with_near_limit(made.own),
    )
    setting = Setting(
        script="pretrain_gpt.py",
        arguments=BEFORE,
        new_arguments=AFTER,
        num_parameters=123_456,
        global_batch_size=16,
        seq_length=32,
        device_name="test cpu",
        device_memory_bytes=8 << 30,
        machines="measured at noon",
        network="",
    )
    seconds = Samples(values_s=(0.04, 0.05, 0.06))
    run = Trial(
        layout=made.chosen.layout,
        placement=made.chosen.placement,
        is_own=False,
        predicted_step_s=made.chosen.step_time_s,
        step=seconds,
        failure="",
        took_s=3.0,
    )
    made = replace(made, setting=setting, trials=Trials(asked=1, iterations=3, runs=(run,)))
    outcome = Outcome(
        key=made.provenance.key,
        layout=made.chosen.layout,
        placement=made.chosen.placement,
        predicted_step_s=made.chosen.step_time_s,
        measured_step=seconds,
        first_iteration=1,
        last_iteration=20,
        losses=(),
        peaks=(PeakReading(rank=0, pp_rank=0, predicted_bytes=90, measured_bytes=100, source="allocator"),),
    )
    picture = picture_of(made, job, measurements)
    return Drawn(job=job, measurements=measurements, plan=made, picture=picture, outcome=outcome)


def _with_near_limit(choice: Choice) -> Choice:
    """Show a limit of 4 MiB, which a tiny model comes near."""
    return replace(choice, memory=replace(choice.memory, limit_bytes=4 << 20, free_bytes=5 << 20))


def many_hosts(count: int) -> Drawn:
    """So many hosts of eight devices, each link with a bandwidth of its own, under a pipeline of 16 ranks."""
    import numpy as np

    from pipette_launch.facts import Links
    from pipette_launch.planning.machines import machines_of

    machines = machines_of(world_size=None, nodes=count, gpu="H100")
    layout = Layout(tp=8, pp=16, dp=count // 16, use_distributed_optimizer=True)
    job = tiny_job(
        8 * count, own=layout, batch=Batch(global_batch_size=count * 2), model=replace(tiny_job().model, num_layers=16)
    )
    job = replace(job, model=replace(job.model, num_attention_heads=8, num_query_groups=8))
    measured = machines.measurements(job, (layout,))
    assert measured is not None
    rates = np.random.default_rng(0).uniform(1e9, 5e10, (count, count))
    cluster = replace(
        measured.cluster,
        hosts=tuple(_named(host, index) for index, host in enumerate(measured.cluster.hosts)),
        between_hosts=Links(latency_s=measured.cluster.between_hosts.latency_s, bandwidth_bytes_per_s=rates),
    )
    measured = replace(measured, cluster=cluster)
    made = planned(replace(job, pinned=tuple(Layout.__slots__)), measured, budget_s=0.0)
    picture = picture_of(made, job, measured)
    return Drawn(job=job, measurements=measured, plan=made, picture=picture, outcome=drawn().outcome)


def _named(host: Host, index: int) -> Host:
    return replace(host, name=f"rack{index // 16:03}-node{index:04}")
