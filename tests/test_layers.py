"""Imports go strictly downward, and only the rooms that need torch or megatron see them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = [
    {"units", "errors"},
    {"facts"},
    {"megatron", "pipette_patches"},
    {"probe", "cost"},
    {"search", "baselines", "forecast"},
    {"replan"},
    {"agent", "report"},
    {"launch"},
    {"cli", "tools"},
    {"__main__"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
PERMITTED = {
    "torch": {"probe", "agent", "cli", "pipette_patches"},
    "megatron": {"pipette_patches"},
    # The only door to megatron-core: measuring the user's layers, inside a worker.
    "pipette_patches": {"probe", "pipette_patches"},
}
SOURCES = sorted((ROOT / "pipette_launch").rglob("*.py")) + sorted((ROOT / "patches").rglob("*.py"))


def room_of(module: str) -> str:
    """`pipette_launch.facts.plan` -> `facts`, `megatron.core` -> `megatron-core`, which is not our room `megatron`."""
    parts = module.split(".")
    if parts[0] == "megatron":
        return "megatron-core"
    if parts[0] == "pipette_launch":
        return parts[1] if len(parts) > 1 else "pipette_launch"
    return parts[0]


def module_of(path: Path) -> str:
    """The dotted name of a source file."""
    base = ROOT / "patches" if path.is_relative_to(ROOT / "patches") else ROOT
    return ".".join(path.relative_to(base).with_suffix("").parts)


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that a file imports, function bodies included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            assert node.module
            yield node.module
            if node.module == "pipette_launch":
                yield from (f"pipette_launch.{alias.name}" for alias in node.names if alias.name in FLOOR_OF)


def faults(module: str, text: str) -> list[str]:
    """What the house rules say against a file, one sentence each."""
    room = room_of(module)
    found = []
    for target in imported(ast.parse(text)):
        there, package = room_of(target), target.split(".")[0]
        if package in PERMITTED and package != room and room not in PERMITTED[package]:
            found.append(f"{room} must not see {package} ({target})")
        elif there in FLOOR_OF and there != room and FLOOR_OF[there] >= FLOOR_OF[room]:
            found.append(f"{room} (floor {FLOOR_OF[room]}) imports {target} (floor {FLOOR_OF[there]})")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_imports_go_down(path: Path) -> None:
    """Each file imports from its own room and from lower floors only."""
    module = module_of(path)
    if module in ("pipette_launch.__init__", "pipette_patches.__init__"):
        return

    assert faults(module, path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("pipette_launch.facts.plan", "import pipette_launch.search.solve"),
        ("pipette_launch.cost.memory", "from pipette_launch.probe import links"),
        ("pipette_launch.search.solve", "def f():\n    import torch"),
        ("pipette_launch.probe.compute", "import megatron.core"),
        ("pipette_launch.launch", "from pipette_patches import registry"),
        ("pipette_launch.replan", "from pipette_launch import agent"),
    ],
)
def test_a_planted_fault_is_found(module: str, line: str) -> None:
    """The rule catches upward, sideways and forbidden imports, wherever they stand."""
    assert len(faults(module, line)) == 1


def test_every_room_has_a_floor() -> None:
    """A new room is put on the map before it is built."""
    rooms = {room_of(module_of(path)) for path in SOURCES} - {"__init__"}

    assert rooms <= set(FLOOR_OF)


def test_packages_are_listed() -> None:
    """setup.cfg lists every package by hand, as setuptools' own search leaves pipette_patches out."""
    folders = {module_of(path).removesuffix(".__init__") for path in SOURCES if path.name == "__init__.py"}
    text = (ROOT / "setup.cfg").read_text().split("packages =")[1].split("package_dir")[0]

    assert folders == set(text.split())
