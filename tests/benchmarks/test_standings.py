"""What the suite says of measured step times: medians, ratios, noise, losses, and who ran the same."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.netlab.compare import Ended
from benchmarks.netlab.suite.contenders import Contender, landed, merged
from benchmarks.netlab.suite.standings import SKIP, Cell, Entrant, distance, headline, lines
from pipette_launch.facts import Layout

LOSSES = ("5.0", "4.0")


def ended(*step_s: float, losses: tuple[str, ...] = LOSSES) -> Ended:
    """A training whose first iterations do not count."""
    return Ended(step_s=(*[9.0] * SKIP, *step_s), losses=losses, wall_s=30.0)


def entrant(*rounds: Ended, name: str = "torchrun", layout: str = "dp4") -> Entrant:
    """A configuration that ran."""
    return Entrant(names=(name,), layout=layout, placement=(0, 1, 2, 3), predicted_s=1.0, rounds=rounds)


def cell(ours: Entrant, *others: Entrant) -> Cell:
    """One model on one network."""
    return Cell(topology="islands", model="balanced", ours=ours, others=others, refused={"Varuna": "no stages"})


def test_ratios_are_of_rounds_and_their_median() -> None:
    """The first iterations do not count; each round is compared with itself."""
    made = cell(entrant(ended(1, 1, 2), ended(2)), entrant(ended(3), ended(3)), entrant(name="AMP"))

    assert (3.0, 1.5) == made.ratios("torchrun")
    assert 2.25 == made.ratio("torchrun")
    assert made.ratio("AMP") is None
    assert 1.5 == made.ours.measured_s
    assert 1.0 == made.noise


def test_slower_is_what_goes_beyond_the_rounds_own_scatter() -> None:
    """5 % behind torchrun counts where rounds agree to 2 %, not where they are 10 % apart."""
    steady = cell(entrant(ended(1.05), ended(1.05)), entrant(ended(1), ended(1)))
    shaky = cell(entrant(ended(1.05), ended(1.05)), entrant(ended(0.95), ended(1.05)))

    assert 0.02 == steady.noise
    assert steady.is_slower
    assert not shaky.is_slower


def test_equal_layouts_must_print_equal_losses() -> None:
    """Other layouts are told apart from losses that differ though the layout is the same."""
    other = ended(1, losses=("5.0", "4.4"))

    assert "1 equal" == cell(entrant(ended(1)), entrant(ended(2))).agreement()
    assert "1 other layouts, at most 10.00% apart" == cell(entrant(ended(1)), entrant(other, layout="pp4")).agreement()
    assert "**torchrun differs under the same layout**" == cell(entrant(ended(1)), entrant(other)).agreement()
    assert 0.5 == distance(["1.0", "3.0"], ["1.0", "2.0"])


def test_the_table_says_what_ran_what_failed_and_what_found_nothing() -> None:
    """A row has a cell for each rival, whatever became of it."""
    failed = replace(entrant(name="AMP"), failure="out of memory")
    head, _, row, *rest = lines([cell(entrant(ended(1), ended(1)), entrant(ended(2), ended(3)), failed)])

    assert head.count("|") == row.count("|")
    assert "| 1000 | 2.50 (2.00-3.00) | failed | failed | nothing | failed |" in row
    assert "AMP: dp4, ranks 0 1 2 3, failed (out of memory); Varuna: found nothing (no stages)" in rest[-1]


def test_the_headline_is_a_geometric_mean_with_its_ends() -> None:
    """Twice as fast and equally fast make 1.41; a cell in which torchrun wins is named."""
    fast = cell(entrant(ended(1)), entrant(ended(2)))
    same = cell(entrant(ended(1)), entrant(ended(1)))
    slow = cell(entrant(ended(2)), entrant(ended(1)))

    assert "over 2 cells: 1.41 x torchrun (1.00 to 2.00); slower than torchrun beyond noise in 0" in headline(
        [fast, same]
    )
    assert "slower than torchrun beyond noise in 1 (islands balanced)" in headline([fast, slow])


def test_who_picks_the_same_words_in_the_same_places_runs_once() -> None:
    """Another placement is another run."""
    one = Contender(names=("torchrun",), layout=Layout(dp=2), placement=(0, 1), words=("s", "--a"), predicted_s=None)
    twin, turned = replace(one, names=("AMP",)), replace(one, names=("Pipette",), placement=(1, 0))

    assert [("torchrun", "AMP"), ("Pipette",)] == [made.names for made in merged([one, turned, twin])]


def test_the_rank_of_a_worker_is_read_from_the_last_that_succeeded() -> None:
    """Agents and other states are passed over; a warm-up's worker came before."""
    event = '{"name": "torchelastic.worker.status.%s", "source": "%s", "metadata": {"global_rank": %s, "a": 1}}'
    said = [
        ("SUCCEEDED", "WORKER", 1),
        ("SUCCEEDED", "WORKER", 2),
        ("START", "WORKER", 3),
        ("SUCCEEDED", "AGENT", "null"),
    ]

    assert 2 == landed("\n".join(event % one for one in said))
    assert landed("nothing") is None
