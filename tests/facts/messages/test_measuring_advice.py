"""Tests of what a plan says should be measured next."""

import pytest
from facts_for_tests import tiny_job

from pipette_launch.errors import FactError
from pipette_launch.facts import files
from pipette_launch.facts.messages.measuring_advice import Advice, Dimension, StageCase


def test_advice_survives_its_file() -> None:
    """What the adviser writes is what the workers read."""
    advice = Advice(
        host_pairs=((0, 1),),
        dimensions=(Dimension(name="dp", kinds=("all_reduce",), groups=((0, 2), (1, 3))),),
        stages=(StageCase(layout=tiny_job(4).own, pp_rank=0),),
        words="two plans",
    )

    assert advice == files.loads(Advice, files.dumps(advice), "advice")


@pytest.mark.parametrize("groups", [((0,),), ((0, 1), (1, 2)), ((1, 0),)])
def test_bad_groups_are_refused(groups: tuple[tuple[int, ...], ...]) -> None:
    """Groups of one, slots in two groups, and slots that do not ascend are none that torch could form."""
    with pytest.raises(FactError, match="dp: "):
        Dimension(name="dp", kinds=("all_reduce",), groups=groups)


def test_a_stage_must_be_one_of_the_layout() -> None:
    """The error names the rank and how many there are."""
    with pytest.raises(FactError, match="pp_rank=9 is not one of"):
        StageCase(layout=tiny_job(4).own, pp_rank=9)


@pytest.mark.parametrize("pair", [(1, 0), (1, 1), (0, 1, 2)])
def test_bad_host_pairs_are_refused(pair: tuple[int, ...]) -> None:
    """A link has two ends, the lower first."""
    with pytest.raises(FactError, match="between two hosts"):
        Advice(host_pairs=(pair,))
