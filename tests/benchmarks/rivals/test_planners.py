"""The rivals as planners: legal picks, each the best by its own model, and what each of them cannot see."""

from dataclasses import replace

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements, tiny_model

from benchmarks.rivals import varuna
from benchmarks.rivals.pick import Pick, PlannerOptions
from benchmarks.rivals.planners import RANKINGS
from pipette_launch.cost.compute.device_model import imagined
from pipette_launch.errors import FactError, PlanError
from pipette_launch.facts import Batch, ComputeCase, Job, Layout, Links, Measurements
from pipette_launch.facts.devices import device_named
from pipette_launch.megatron.rules.broken import Rules
from pipette_launch.megatron.rules.judge import broken_rule
from pipette_launch.text import GIB

CASES = tuple(ComputeCase(tp=tp, cp=1, micro_batch_size=1) for tp in (1, 2))


class Ticks:
    """A clock that shows a millisecond more at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Tick once."""
        self.now += 1e-3
        return self.now


def options(**changes: object) -> PlannerOptions:
    """Plenty of memory, and 300 steps for each annealing."""
    given = PlannerOptions(capacity_bytes=8 * GIB, clock=Ticks(), budget_s=0.3)
    return replace(given, **changes)  # type: ignore[arg-type]


def unequal(hosts: int = 4) -> Measurements:
    """Hosts of two devices; the farther apart two hosts are named, the slower their link, one way more than back."""
    cluster = tiny_cluster(hosts, 2)
    rates = tuple(
        tuple(0.0 if a == b else 1e8 / (1 + abs(a - b) + 0.1 * (a > b)) for b in range(hosts)) for a in range(hosts)
    )
    links = Links(latency_s=cluster.between_hosts.latency_s, bandwidth_bytes_per_s=rates)
    return tiny_measurements(replace(cluster, between_hosts=links), CASES)


def picked(name: str, job: Job, measurements: Measurements, **changes: object) -> Pick:
    """The pick of one rival."""
    return RANKINGS[name](job, measurements, options(**changes))[0]


@pytest.mark.parametrize("name", RANKINGS)
def test_every_pick_is_legal_and_fills_every_slot(name: str) -> None:
    """Megatron takes each layout of a ranking, every RANK is used once, and the order is by the rival's own claims."""
    job = tiny_job(8)
    ranking = RANKINGS[name](job, unequal(), options())
    rules = Rules.of(job, device_kind="cpu")

    assert not [reason for pick in ranking if (reason := broken_rule(rules, pick.layout))]
    assert all(list(range(8)) == sorted(pick.placement) for pick in ranking)
    assert len(ranking) == len({pick.layout for pick in ranking})
    if name != "megatron-rules":
        claims = [pick.claimed_s for pick in ranking]
        assert claims == sorted(claims)


def test_amp_does_not_ask_for_memory_and_the_others_do() -> None:
    """On devices of 100 kB AMP picks what it always picks; Varuna, Pipette and the rules find nothing."""
    job, measured = tiny_job(8), unequal()

    assert picked("amp", job, measured) == picked("amp", job, measured, capacity_bytes=100_000)
    for name in ("varuna", "pipette", "megatron-rules"):
        with pytest.raises(PlanError, match="find"):
            picked(name, job, measured, capacity_bytes=100_000)


def test_varuna_has_no_tensor_parallelism_and_packs_its_pipelines() -> None:
    """Tp = 1, full recompute, the largest micro-batch that divides, and slots in a row are stages in a row."""
    job, measured = tiny_job(8), unequal()

    for pick in RANKINGS["varuna"](job, measured, options()):
        layout = pick.layout
        cells = [layout.cell_of(rank) for rank in pick.placement]
        assert (1, "full", 16 // layout.dp) == (layout.tp, layout.recompute.granularity, layout.micro_batch_size)
        assert [slot % layout.pp for slot in range(8)] == [cell.pp for cell in cells]
        assert [slot // layout.pp for slot in range(8)] == [cell.dp for cell in cells]


def test_varuna_takes_a_smaller_micro_batch_where_memory_ends() -> None:
    """Between the needs of two and of four samples it takes two."""
    job, measured = tiny_job(8), unequal()
    two, four = (varuna.memory_bytes(job, Layout(pp=2, dp=4, micro_batch_size=size)) for size in (2, 4))
    found = RANKINGS["varuna"](job, measured, options(capacity_bytes=(two + four) // 2))

    assert [2] == [pick.layout.micro_batch_size for pick in found if pick.layout.pp == 2]


def test_pipette_moves_its_hosts_off_the_slow_links() -> None:
    """Hosts in a shuffled chain: its mapping leaves torchrun's order, and the same seed gives it again."""
    cluster = unequal().cluster
    shuffled = [2, 0, 3, 1]
    rates = cluster.between_hosts.bandwidth_bytes_per_s
    chain = tuple(tuple(rates[a][b] for b in shuffled) for a in shuffled)
    links = replace(cluster.between_hosts, bandwidth_bytes_per_s=chain)
    measured = tiny_measurements(replace(cluster, between_hosts=links), CASES)
    job = replace(tiny_job(8, pinned=("pp",)), own=Layout(pp=4, dp=2), batch=Batch(global_batch_size=64))
    pick = picked("pipette", job, measured)

    assert 4 == pick.layout.pp
    assert pick.claimed_s is not None
    assert pick.placement != tuple(range(8))
    assert pick == picked("pipette", job, measured)


def test_megatrons_rules_widen_tp_before_pp_and_recompute_last() -> None:
    """As memory shrinks: data parallelism alone, then TP, then PP, then recompute."""
    model = tiny_model(num_layers=4, hidden_size=512, ffn_hidden_size=2048, kv_channels=128, seq_length=256)
    job, measured = tiny_job(8, model=model), unequal()
    layouts = [
        picked("megatron-rules", job, measured, capacity_bytes=mebibytes << 20).layout
        for mebibytes in (200, 100, 70, 60, 50)
    ]

    assert [(1, 1), (2, 1), (2, 2), (2, 4), (2, 4)] == [(layout.tp, layout.pp) for layout in layouts]
    assert ["none"] * 4 + ["full"] == [layout.recompute.granularity for layout in layouts]


def test_pins_hold() -> None:
    """No rival changes what the user has pinned; where nothing of that kind is left, it says so."""
    job = tiny_job(8, pinned=("tp",))

    assert all(1 == picked(name, job, unequal()).layout.tp for name in RANKINGS)
    with pytest.raises(PlanError, match="Varuna finds no layout"):
        picked("varuna", tiny_job(8, own=Layout(tp=2, etp=2, dp=4), pinned=("tp",)), unequal())


def test_amp_leaves_a_pinned_cut_alone() -> None:
    """Seven layers make uneven stages; with even ones pinned only one stage is left."""
    model = tiny_model(num_layers=7)
    free, held = (
        RANKINGS["amp"](tiny_job(8, model=model, pinned=pins), unequal(), options())
        for pins in ((), ("layers_per_chunk",))
    )

    assert any(pick.layout.layers_per_chunk for pick in free)
    assert {(1, ())} == {(pick.layout.pp, pick.layout.layers_per_chunk) for pick in held}


def test_impossible_options_are_refused() -> None:
    """Memory and time are positive."""
    with pytest.raises(FactError, match="capacity_bytes >= 1"):
        options(capacity_bytes=0)


def test_megatrons_rules_share_experts_before_they_slice_matrices() -> None:
    """As memory shrinks: experts over more ranks of a host, and no tensor parallelism while that suffices."""
    model = tiny_model(
        num_layers=4, hidden_size=1024, num_experts=8, moe_layer_freq=(1,) * 4, moe_ffn_hidden_size=4096,
        params_dtype="bf16", transformer_impl="transformer_engine", attention_backend="flash",
    )  # fmt: skip
    job = tiny_job(8, model=model)
    sizes = [
        Layout(tp=tp, dp=8 // tp, sequence_parallel=tp > 1, micro_batch_size=size)
        for tp in (1, 2, 4)
        for size in (1, 2)
    ]
    measured = imagined(job, device_named("H100-SXM"), num_hosts=2, devices_per_host=4, layouts=sizes)
    found = [
        picked("megatron-rules", job, measured, capacity_bytes=int(gibibytes * (1 << 30))).layout
        for gibibytes in (4.0, 3.2, 2.7)
    ]

    assert {(1, 1)} == {(layout.tp, layout.etp) for layout in found}
    experts = [layout.ep for layout in found]
    assert experts == sorted(experts)
    assert experts[0] < experts[-1]
