"""The map of the house in docs/design.md leads to files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "design.md").read_text()


def test_every_path_of_the_page_exists() -> None:
    """What `Where do I change what` names is there, below the package or below the repository."""
    page = PAGE.partition("## Where do I change what")[2].partition("\n## ")[0]
    paths = set(re.findall(r"`([\w./]+(?:\.py|\.json|/))`", page))

    assert len(paths) > 40
    roots = (ROOT / "pipette_launch", ROOT)
    assert set() == {path for path in paths if not any((root / path).exists() for root in roots)}


def test_every_room_is_on_the_map() -> None:
    """Each folder of the package that holds code stands in the table of sub-rooms or rooms."""
    folders = {path.parent.name for path in (ROOT / "pipette_launch").glob("*/**/__init__.py")}

    assert set() == {name for name in folders if f"`{name}`" not in PAGE and f"{name}/" not in PAGE}
