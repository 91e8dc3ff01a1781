"""Values that are kept."""

from __future__ import annotations

from pipette_launch.cost import Memo


def test_a_value_is_made_once_until_there_are_too_many() -> None:
    """The third key empties a memo of two."""
    made: list[str] = []
    memo: Memo[int] = Memo(most=2)

    def get(key: str) -> int:
        return memo.get(key, lambda: made.append(key) or len(made))

    assert [1, 2, 1, 3, 4] == [get(key) for key in "abaca"]
    assert (["a", "b", "c", "a"], 2) == (made, len(memo))
