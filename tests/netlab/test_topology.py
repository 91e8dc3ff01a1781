"""What topology files mean, and what they may not say."""

from __future__ import annotations

import sys
from pathlib import Path as FilePath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.netlab import topology, wires
from benchmarks.netlab.topology import Host, Path, Topology, TopologyError, parse, uneven


def test_a_number_of_hosts_is_enough() -> None:
    """Hosts are named by number, and every direction has the usual rate."""
    made = parse({"hosts": 3, "rate_mbit": 200})

    assert ("n0", "n1", "n2") == tuple(host.name for host in made.hosts)
    assert {Path(rate_mbit=200.0)} == set(made.paths.values())
    assert 6 == len(made.paths)


def test_links_win_over_islands_and_later_over_earlier() -> None:
    """An island sets its inner links, a link both directions or one, the last word counts."""
    made = parse(
        {
            "hosts": 4,
            "rate_mbit": 10,
            "latency_ms": {"near": 0, "far": 2},
            "island": [{"hosts": ["n0", "n1"], "rate_mbit": 1000}, {"hosts": ["n2", "n3"], "rate_mbit": 500}],
            "link": [
                {"between": ["n0", "n2"], "rate_mbit": 20, "latency": "far"},
                {"from": "n2", "to": "n0", "rate_mbit": 5},
                {"from": "n1", "to": "n0", "rate_mbit": 900},
            ],
        }
    )

    assert (1000, 900) == (made.paths["n0", "n1"].rate_mbit, made.paths["n1", "n0"].rate_mbit)
    assert 500 == made.paths["n2", "n3"].rate_mbit
    assert Path(rate_mbit=20.0, latency_ms=2.0) == made.paths["n0", "n2"]
    assert Path(rate_mbit=5.0, latency_ms=2.0) == made.paths["n2", "n0"]
    assert Path(rate_mbit=10.0) == made.paths["n1", "n3"]


def test_hosts_may_have_names_slots_and_shares_of_their_own() -> None:
    """A table changes one of the numbered hosts, or names them all."""
    numbered = parse({"hosts": 2, "slots": 2, "host": [{"name": "n1", "share": 0.5}]})
    named = parse({"host": [{"name": "left"}, {"name": "right", "slots": 3}]})

    assert (Host(name="n0", slots=2), Host(name="n1", slots=2, share=0.5)) == numbered.hosts
    assert (Host(name="left"), Host(name="right", slots=3)) == named.hosts


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"hosts": 0}, "1 to 100 hosts"),
        ({"hosts": 2, "rate": 5}, "unknown key 'rate'; known are"),
        ({"hosts": 2, "link": [{"between": ["n0", "n9"]}]}, "n0 to n9 is not a link; hosts are n0, n1"),
        ({"hosts": 2, "link": [{"from": "n0"}]}, "`between` two hosts, or goes `from` one `to` another"),
        ({"hosts": 2, "link": [{"between": ["n0", "n1"], "latency": "x"}]}, "latency class 'x' is none of near"),
        ({"hosts": 2, "host": [{"name": "n7"}]}, "'n7' is none of n0, n1"),
        ({"hosts": 2, "rate_mbit": 0}, "rate_mbit=0.0 must be above 0"),
        ({"host": [{"name": "Big Host"}]}, "lower-case letters"),
        ({"hosts": 1, "host": [{"name": "n0", "share": 2}]}, "share=2 in (0, 1]"),
        ({"hosts": 1, "latency_ms": {}}, "at least one class"),
    ],
)
def test_what_makes_no_sense_is_named(document: dict[str, Any], said: str) -> None:
    """Every mistake is told with the entry and what it may be."""
    with pytest.raises(TopologyError) as raised:
        parse(document)

    assert said in str(raised.value)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python reads TOML from 3.11 on")
def test_a_file_is_read_and_named_in_its_errors(tmp_path: FilePath) -> None:
    """The same from TOML; an error begins with the file's name."""
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text('hosts = 2\n[[link]]\nbetween = ["n0", "n1"]\nrate_mbit = 7\n')
    bad.write_text("hosts = \n")

    assert {Path(rate_mbit=7.0)} == set(topology.read(good).paths.values())
    with pytest.raises(TopologyError, match=r"bad\.toml"):
        topology.read(bad)


@given(
    num_hosts=st.integers(2, 9),
    rates=st.lists(st.integers(1, 999), min_size=1, max_size=80),
    seed=st.integers(0, 9),
    symmetric=st.booleans(),
)
def test_uneven_links_take_the_rates_in_turn(num_hosts: int, rates: list[int], seed: int, symmetric: bool) -> None:
    """Each rate is used equally often, give or take one, and the same seed draws the same links."""
    made = uneven(num_hosts, rates, seed=seed, symmetric=symmetric)

    assert made == uneven(num_hosts, rates, seed=seed, symmetric=symmetric)
    pairs = list(made.pairs() if symmetric else made.directions())
    assert sorted(rates[index % len(rates)] for index in range(len(pairs))) == sorted(
        made.paths[pair].rate_mbit for pair in pairs
    )
    if symmetric:
        assert all(made.paths[a, b] == made.paths[b, a] for a, b in pairs)


def test_a_missing_path_is_refused() -> None:
    """A topology made by hand must join all hosts, both ways."""
    with pytest.raises(TopologyError, match=r"missing: \[\('b', 'a'\)\]"):
        Topology(hosts=(Host(name="a"), Host(name="b")), paths={("a", "b"): Path(rate_mbit=1)})


def test_rates_become_token_buckets() -> None:
    """Rates are written in kbit, bursts are a millisecond's worth and never below what a slow link needs."""
    fast, slow = (wires.limit("n1", Path(rate_mbit=rate)) for rate in (1000, 40))

    assert "qdisc add dev to-n1 root tbf rate 1000000kbit burst 125000b latency 100ms" == fast
    assert "qdisc add dev to-n1 root tbf rate 40000kbit burst 16384b latency 100ms" == slow


def test_addresses_sort_as_text() -> None:
    """Torch sorts hosts by their addresses as text; that must be the order of the file."""
    addresses = [wires.address(index) for index in range(topology.MAX_HOSTS)]

    assert sorted(addresses) == addresses
