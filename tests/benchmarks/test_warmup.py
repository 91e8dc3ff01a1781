"""How the warm-up's benchmark scores: links against their rates, verdicts against faults, parts into a report."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.bench_warmup import put_section
from benchmarks.warmup.score import Compared, Fault, judged, outside, ranked
from benchmarks.warmup.trial import healthy, steps
from pipette_launch.facts.health import Verdict


def row(set_mbit: float, got_mbit: float) -> Compared:
    """A link that was measured."""
    return Compared(sender="a", receiver="b", set_mbit=set_mbit, got_mbit=got_mbit)


def test_links_beyond_the_tolerance_are_listed_worst_first() -> None:
    """Ten per cent either way is within."""
    rows = [row(100, 91), row(100, 120), row(100, 85), row(100, 109)]

    assert [rows[1], rows[2]] == outside(rows)


def test_rank_counts_only_rates_that_are_apart() -> None:
    """Two links 15 % apart must be told apart; neighbours closer than that may change places."""
    slow, near, fast = row(100, 112), row(105, 103), row(115, 111)

    pairs, wrong = ranked([fast, near, slow])

    assert 1 == pairs
    assert [(slow, fast)] == wrong


def test_steps_rise_by_the_factor() -> None:
    """From the least to the most, rounded."""
    assert [100.0, 115.0, 132.0, 152.0] == steps(100, 160, 1.15)


def test_a_verdict_finds_a_fault_by_host_or_by_link() -> None:
    """A link is found in either direction unless only one is slow; what is about nothing wrong is a false alarm."""
    link = Fault(host="n1", peer="n3", level=50)
    one_way = Fault(host="n1", peer="n3", level=50, one_way=True)
    device = Fault(host="n2", level=0.5)
    back = Verdict(kind="slow-link", host="n3", other_host="n1", figure="6 MB/s")
    slow = Verdict(kind="slow-device", host="n2", device="cpu-0", figure="0.5")
    note = replace(back, host="n0", is_sick=False)

    assert ([], []) == judged([back, slow, note], [link, device])
    assert ([one_way], [back]) == judged([back, slow], [one_way, device])
    assert ([device], []) == judged([back], [link, device])


def test_healthy_networks_differ_by_design_alone() -> None:
    """Islands are fast within and slow between; what is nearly uniform stays within 3 %."""
    islands = {(a < "n2") == (b < "n2"): path.rate_mbit for (a, b), path in healthy("two islands", 4).paths.items()}
    nearly = {path.rate_mbit for path in healthy("nearly uniform", 4).paths.values()}

    assert {True: 800, False: 200} == islands
    assert 0.97 * 400 == min(nearly)
    assert 1.03 * 400 >= max(nearly)


def test_a_part_takes_the_place_of_its_former_self() -> None:
    """Sections are added at the end and renewed where they stand."""
    first = put_section("", "One", "a")
    both = put_section(first, "Two", "b")

    assert "# The warm-up on namespaced hosts\n\n## One\n\na\n\n## Two\n\nb\n" == both
    assert both.replace("a\n\n## Two", "c\n\n## Two") == put_section(both, "One", "c")
