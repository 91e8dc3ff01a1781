"""Imports go strictly downward, and only the rooms that need torch or megatron see them."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = [
    {"units", "errors", "defaults", "printable", "compiled"},
    {"facts", "packages"},
    {"megatron", "pipette_patches"},
    {"probe", "cost"},
    {"search", "baselines", "forecast"},
    {"replan"},
    {"agent", "report"},
    {"launch"},
    {"cli_flags"},
    {"cli", "tools"},
    {"__main__", "api"},
]
SUB_FLOORS = {
    # Sub-rooms and the files beside them: each imports from itself and from lower floors of its own room only.
    "facts": [
        {"checks", "headings"},
        {"files", "health", "meanings", "performance", "schedule"},
        {"layout"},
        {"layout_columns", "model", "pipeline", "schedule_file", "schedules"},
        {"job"},
        {"machines"},
        {"measurements", "together"},
        {"results", "some_hosts"},
        {"messages"},
    ],
    "megatron": [
        {"allocator", "environment", "flags", "logs"},
        {"chunks", "faults", "performance", "tokenizers", "trial", "unknown_words", "version"},
        {"pins"},
        {"checkpoint", "layout"},
        {"model", "rules", "write"},
        {"read"},
    ],
    "pipette_patches": [
        {"errors"},
        {"registry", "replacements"},
        {"without_cuda"},
        {"cpu", "schedules", "workload"},
        {"abstract", "run"},
        {"whole_stage"},
    ],
    "cost": [
        {"layers", "memo", "pipeline"},
        {"communication", "memory"},
        {"compute"},
        {"step"},
        {"columns"},
        {"learned"},
    ],
    "probe": [
        {"device_clock", "health", "plan_hints", "progress", "waits"},
        {"options"},
        {"harness"},
        {"compute", "links"},
        {"assemble"},
        {"phases"},
        {"run"},
        {"order_check"},
    ],
    "search": [
        {"assignment", "bounds", "layouts"},
        {"step_model"},
        {"placement"},
        {"candidates"},
        {"choose", "frontier", "no_plan"},
        {"explanations", "pricing"},
        {"search_loop"},
        {"schedule_choice"},
        {"solve"},
        {"fewer_hosts"},
        {"templates"},
    ],
    "agent": [
        {"controller", "device_binding", "failures", "leaving", "orphans", "scontrol", "streams", "sudden_deaths"},
        {"failure_attribution", "logs", "signals", "sync"},
        {"worker_health"},
        {"phases"},
        {"elastic"},
        {"start"},
    ],
    "launch": [
        {"cache", "measuring_advice", "nodes", "options", "setting", "slurm", "training"},
        {"page"},
        {"trace"},
        {"commands", "device_orders", "health_policy", "user_script", "warmup_orders"},
        {"plans", "trials"},
        {"display"},
        {"live"},
        {"decisions"},
        {"coordinator"},
        {"node_controller"},
    ],
}
SUB_FLOOR_OF = {
    room: {name: at for at, names in enumerate(floors) for name in names} for room, floors in SUB_FLOORS.items()
}
LARGEST_FOLDER = 16
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
PERMITTED = {
    "torch": {"probe", "agent", "cli", "cli_flags", "pipette_patches"},
    "megatron": {"pipette_patches"},
    # The only door to megatron-core: measuring the user's layers, inside a worker.
    "pipette_patches": {"probe", "pipette_patches"},
}
SOURCES = sorted((ROOT / "pipette_launch").rglob("*.py")) + sorted((ROOT / "patches").rglob("*.py"))


def room_of(module: str) -> str:
    """`pipette_launch.facts.job` -> `facts`, `megatron.core` -> `megatron-core`, which is not our room `megatron`."""
    parts = module.split(".")
    if parts[0] == "megatron":
        return "megatron-core"
    if parts[0] == "pipette_launch":
        return parts[1] if len(parts) > 1 else "pipette_launch"
    return parts[0]


def is_room(module: str) -> bool:
    """Whether a dotted name is that of a room itself."""
    return module in {"pipette_patches", f"pipette_launch.{room_of(module)}"}


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
            names = SUB_FLOOR_OF.get(room_of(node.module), {})
            yield from (
                f"{node.module}.{alias.name}" for alias in node.names if is_room(node.module) and alias.name in names
            )


def sub_room_of(module: str) -> str:
    """`pipette_launch.cost.step.assemble` -> `step`, `pipette_launch.cost` -> ``."""
    parts = module.split(".")[1:] if module.startswith("pipette_patches") else module.split(".")[2:]
    return parts[0] if parts else ""


def sub_room_faults(room: str, module: str, target: str) -> list[str]:
    """What the order of sub-rooms says against an import inside a room."""
    floors, own, other = SUB_FLOOR_OF[room], sub_room_of(module), sub_room_of(target)
    if own in {"__init__", other} or other == "":
        return []
    return [] if floors[other] < floors[own] else [f"{room}.{own} imports {room}.{other}, which is not below it"]


def faults(module: str, text: str) -> list[str]:
    """What the house rules say against a file, one sentence each."""
    room = room_of(module)
    found = []
    for target in imported(ast.parse(text)):
        there, package = room_of(target), target.split(".")[0]
        if package in PERMITTED and package != room and room not in PERMITTED[package]:
            found.append(f"{room} must not see {package}")
        elif there == room and room in SUB_FLOOR_OF:
            found += sub_room_faults(room, module, target)
        elif there in FLOOR_OF and there != room and FLOOR_OF[there] >= FLOOR_OF[room]:
            found.append(f"{room} (floor {FLOOR_OF[room]}) imports {there} (floor {FLOOR_OF[there]})")
    return sorted(set(found))


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
        ("pipette_launch.facts.results.plan", "import pipette_launch.search.solve"),
        ("pipette_launch.cost.memory.peak", "from pipette_launch.probe import links"),
        ("pipette_launch.search.solve", "def f():\n    import torch"),
        ("pipette_launch.probe.compute.layers", "import megatron.core"),
        ("pipette_launch.launch", "from pipette_patches import registry"),
        ("pipette_launch.replan", "from pipette_launch import agent"),
        ("pipette_launch.cost.layers.parameters", "from pipette_launch.cost.step import assemble"),
        ("pipette_launch.search.assignment.descent", "from pipette_launch.search import candidates"),
        ("pipette_patches.workload.layers", "from pipette_patches.abstract.allocator import Ledger"),
    ],
)
def test_a_planted_fault_is_found(module: str, line: str) -> None:
    """The rule catches upward, sideways and forbidden imports, wherever they stand."""
    assert len(faults(module, line)) == 1


def test_every_room_has_a_floor() -> None:
    """A new room is put on the map before it is built."""
    rooms = {room_of(module_of(path)) for path in SOURCES} - {"__init__"}

    assert rooms <= set(FLOOR_OF)


@pytest.mark.parametrize("room", SUB_FLOORS)
def test_every_sub_room_has_a_floor(room: str) -> None:
    """A new sub-room, or a file beside the sub-rooms, is put into their order before it is built."""
    inside = {sub_room_of(module_of(path)) for path in SOURCES if room_of(module_of(path)) == room}

    assert inside - {"", "__init__", "__main__"} == set(SUB_FLOOR_OF[room])


def test_no_folder_is_crowded() -> None:
    """A folder holds at most 16 files; beyond that it is two rooms."""
    sizes = Counter(path.parent.relative_to(ROOT) for path in SOURCES)

    assert {folder: size for folder, size in sizes.items() if size > LARGEST_FOLDER} == {}


def test_packages_are_listed() -> None:
    """setup.cfg lists every package by hand, as setuptools' own search leaves pipette_patches out."""
    folders = {module_of(path).removesuffix(".__init__") for path in SOURCES if path.name == "__init__.py"}
    text = (ROOT / "setup.cfg").read_text().split("packages =")[1].split("package_dir")[0]

    assert folders == set(text.split())
