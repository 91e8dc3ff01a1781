"""What a warm-up says of each of its phases."""

from __future__ import annotations

from pipette_launch.probe.options import WorkerResult
from pipette_launch.probe.phases import _groups_words, _links_words


def test_one_thing_is_not_called_several() -> None:
    """Rounds, collectives and sets of groups are counted in words that fit the number."""
    one, more = WorkerResult(slot=0, link_rounds=(1,)), WorkerResult(slot=0, link_rounds=(3, 4), link_rounds_again=(2,))

    assert "2 hosts in 1 round" == _links_words(one, 2)
    assert "8 hosts in 7 rounds and 2 again for suspects" == _links_words(more, 8)
    assert "1 collective timed in 1 set of groups" == _groups_words(1, 1)
    assert "3 collectives timed in 2 sets of groups" == _groups_words(3, 2)
