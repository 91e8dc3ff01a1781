"""What a plan that ran out of memory says of other plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch.worlds import choice, plan

from pipette_launch.cost.memory.overhead import allowed_bytes
from pipette_launch.errors import FactError
from pipette_launch.facts import Choice, Layout, Plan
from pipette_launch.facts.machines.device_memory import MemoryNeed
from pipette_launch.facts.results.shortage import MOST_CHARACTERS, Shortage, lower

FREE = 1000
AT = "2026-11-24T00:00:00+00:00"
DP, PP, TP = Layout(dp=4), Layout(pp=2, dp=2), Layout(tp=2, dp=2)


def needing(layout: Layout, need_bytes: int, *, free_bytes: int = FREE, limit_bytes: int = 920) -> Choice:
    """A plan whose first stage is predicted to need so much."""
    need = MemoryNeed(need_bytes=(need_bytes, *(1,) * (layout.pp - 1)), free_bytes=free_bytes, limit_bytes=limit_bytes)
    return replace(choice(layout), memory=need)


def shortage(need_bytes: int = 600, free_bytes: int = FREE) -> Shortage:
    """A plan that ran out of memory."""
    return Shortage(layout=DP, need_bytes=need_bytes, free_bytes=free_bytes, cause="out of memory", noticed_at=AT)


def of_needs(chosen: int, *others: int, own: int = 900) -> Plan:
    """A plan whose candidates need so much, each under a layout of its own."""
    made = plan(PP, *(TP, Layout(tp=4), Layout(pp=4))[: len(others)])
    alternatives = tuple(needing(one.layout, need) for one, need in zip(made.alternatives, others, strict=True))
    return replace(made, chosen=needing(PP, chosen), alternatives=alternatives, own=needing(DP, own))


def test_the_fullest_device_counts() -> None:
    """Its need, overhead included, beside what was free."""
    found = Shortage.of(needing(PP, 600), cause="x" * 2 * MOST_CHARACTERS, noticed_at=AT)

    assert found is not None
    assert (PP, 600, FREE, MOST_CHARACTERS) == (found.layout, found.need_bytes, found.free_bytes, len(found.cause))


def test_what_was_not_predicted_to_fit_teaches_nothing() -> None:
    """The margin was right about it; of files of earlier releases nobody knows."""
    assert Shortage.of(needing(PP, 950), cause="", noticed_at=AT) is None
    assert Shortage.of(choice(PP), cause="", noticed_at=AT) is None


def test_a_plan_that_was_to_need_little_was_not_to_blame() -> None:
    """Something else took the memory, or a limit was set."""
    assert Shortage.of(needing(PP, 499), cause="", noticed_at=AT) is None
    assert Shortage.of(needing(PP, 500), cause="", noticed_at=AT) is not None


def test_predictions_are_taken_to_be_too_low() -> None:
    """600 of 1000 were not enough: of 1000 free bytes 92 % of 600 are to be had, and of 2000 twice that."""
    margin = shortage().margin(0.08)

    assert 0.92 * 0.599 == pytest.approx(1 - margin)
    assert (551, 1102) == (allowed_bytes(1000, memory_margin=margin), allowed_bytes(2000, memory_margin=margin))


@given(free=st.integers(1, 1 << 40), part=st.floats(0, 1), memory_margin=st.sampled_from([0.0, 0.08, 0.995]))
def test_the_plan_that_ran_out_of_memory_never_fits_again(free: int, part: float, memory_margin: float) -> None:
    """Each shortage lowers the limit, so that tries come to an end; nor does a margin become smaller by it."""
    need = max(int(part * free), 1)
    margin = shortage(need, free).margin(memory_margin)

    assert memory_margin <= margin < 1
    assert allowed_bytes(free, memory_margin=margin) < need


def test_a_plan_is_ruled_out_by_its_part_of_what_is_free() -> None:
    """Where twice as much is free twice as much may be needed; without figures nothing is known."""
    known = shortage()

    assert [False, True, True] == [known.rules_out(needing(PP, need)) for need in (599, 600, 601)]
    assert [False, True] == [known.rules_out(needing(PP, need, free_bytes=2 * FREE)) for need in (1199, 1200)]
    assert not known.rules_out(choice(PP))


def test_candidates_that_need_as_much_are_left_out() -> None:
    """The next that needs less is chosen; where none does, nothing is."""
    leaner = shortage().leaner(of_needs(800, 500, 700, 400))

    assert leaner is not None
    assert [500, 400] == [max(one.memory_shown.need_bytes) for one in leaner.candidates()]
    assert shortage().leaner(of_needs(800, 600)) is None


def test_a_plan_whose_candidates_all_need_less_stays() -> None:
    """The user's own configuration, its last resort, may need more; what trials put behind it stays there."""
    kept = of_needs(500, 400)
    settled = replace(of_needs(500, 400, 700), num_in_line=1)

    assert kept == shortage().leaner(kept)
    assert settled == shortage().leaner(settled)


def test_the_users_own_configuration_is_judged_where_it_is_the_plan() -> None:
    """It is the only candidate then."""
    own = replace(of_needs(500, own=700), keeps_own=True)

    assert shortage().leaner(own) is None
    assert own == shortage(800).leaner(own)


def test_the_lower_of_two_counts() -> None:
    """By the part of what was free; the first where they are alike."""
    one, other = shortage(600), shortage(800, 2 * FREE)

    assert other == lower(one, other) == lower(other, one)
    assert one == lower(one, None) == lower(None, one)
    assert one is lower(one, replace(one, cause="again"))
    assert lower(None, None) is None


def test_says_which_plan_when_how_and_how_much() -> None:
    """In one sentence."""
    assert (
        "the plan tp1 pp1 dp4 mbs1 ran out of memory at 2026-11-24T00:00:00+00:00 (out of memory), though only 600 B "
        "of 1000 B were predicted to be needed"
    ) == shortage().sentence


@pytest.mark.parametrize(
    "changes", [{"need_bytes": 0}, {"need_bytes": FREE + 1}, {"cause": "x" * 1001}, {"noticed_at": "x" * 1001}]
)
def test_a_file_that_nobody_wrote_is_refused(changes: dict[str, object]) -> None:
    """A need of nothing, of more than was free, and prose without end."""
    with pytest.raises(FactError):
        replace(shortage(), **changes)  # type: ignore[arg-type]
