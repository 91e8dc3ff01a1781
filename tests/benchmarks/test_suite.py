"""The suite's scaffolding: networks and models that are what they are called, and parts that become a report."""

from __future__ import annotations

from benchmarks.netlab.suite.cases import MODELS, NUM_HOSTS, TOPOLOGIES, training
from benchmarks.netlab.suite.parts import TITLES, Entry, PartResult, entry, report
from pipette_launch import megatron

FOUND = {
    "command": "python -m suite",
    "date": "today",
    "commit": "abc",
    "versions": "some",
    "machine": "small",
    "load": "0.1",
    "stolen": "2.0%",
    "pace": "8.1 ms in the median",
}


def made(name: str, headline: str, *lines: str) -> Entry:
    """What a part left."""
    return entry(PartResult(name=name, lines=lines, raw={}, headline=headline), FOUND, took_s=3.4)


def rates(name: str) -> dict[tuple[str, str], float]:
    """Of every direction of a network."""
    return {pair: path.rate_mbit for pair, path in TOPOLOGIES[name]().paths.items()}


def test_networks_are_what_they_are_called() -> None:
    """One rate; neighbours that are far apart; each way its own; neighbours that are near."""
    islands, ways, best = rates("islands"), rates("asymmetric"), rates("already-best")
    ring = [(f"n{a}", f"n{(a + 1) % NUM_HOSTS}") for a in range(NUM_HOSTS)]

    assert 1 == len(set(rates("uniform").values()))
    assert 0.5 == min(host.share for host in TOPOLOGIES["slow-node"]().hosts)
    assert {min(islands.values())} == {islands[pair] for pair in ring}
    assert islands["n0", "n2"] == islands["n3", "n1"] == max(islands.values())
    assert all(ways[a, b] < ways[b, a] for a, b in ring)
    assert {max(best.values())} == {best[pair] for pair in ring}
    assert 6 == len({rates("random")[a, b] for a, b in TOPOLOGIES["random"]().pairs()})


def test_models_are_jobs_that_four_hosts_can_run() -> None:
    """Every model is read as data parallelism over all hosts, and the one heavy on links has the most parameters."""
    read = {
        name: megatron.read_job(
            training(name, iterations=8)[1:], world_size=NUM_HOSTS, megatron_version="0.16.1", device_kind="cpu"
        )
        for name in MODELS
    }
    parameters = {name: job.model.num_layers * job.model.hidden_size**2 for name, job in read.items()}
    tokens = {name: job.batch.global_batch_size * job.model.seq_length for name, job in read.items()}
    order = ["communication-heavy", "balanced", "compute-heavy"]

    assert {NUM_HOSTS} == {job.own.dp for job in read.values()}
    assert order == sorted(order, key=lambda name: tokens[name] / parameters[name])


def test_the_report_has_a_row_and_a_section_of_each_part_in_one_order() -> None:
    """Whatever was run first: parts stand in the order of their titles, with their own first lines."""
    text = report({"trials": made("trials", "never slower", "| t |"), "speedup": made("speedup", "1.5 times", "| s |")})

    assert "| Speed-up | 1.5 times | today, abc |\n| Trials mode | never slower | today, abc |\n" in text
    assert text.index("## Speed-up") < text.index("| s |") < text.index("## Trials mode") < text.index("| t |")
    assert "`python -m suite`, today, commit abc; took 3 s;" in text
    assert set(TITLES) >= {"speedup", "trials"}
