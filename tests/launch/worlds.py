"""Small jobs for tests of the launch room: records of nodes, options, plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from facts_for_tests import memory_need, tiny_cluster
from megatron_lines import SMALL

from pipette_launch.facts import Choice, Layout, Plan, Provenance
from pipette_launch.facts.messages import Decision, NodeRecord
from pipette_launch.launch.cache import CLUSTER
from pipette_launch.launch.coordinator import Coordinator
from pipette_launch.launch.options import Options

SCRIPT = str(Path(__file__).parent.parent / "end_to_end" / "echo.py")
ARGUMENTS = (*SMALL, "--transformer-impl", "local")


def records(count: int = 2, **changes: Any) -> list[NodeRecord]:
    """Return the descriptions of nodes with two CPU slots each, before any attempt."""
    return [
        replace(
            NodeRecord(
                token=f"token-{host.name}",
                host=host,
                trouble="",
                num_slots=2,
                node_rank=-1,
                script_digest="d",
                versions={"torch": "2.13.0"},
                attempt=-1,
                verdict="none",
                failure=None,
                max_restarts=3,
            ),
            **changes,
        )
        for host in tiny_cluster(hosts=count).hosts
    ]


def options(*more: str, arguments: tuple[str, ...] = ARGUMENTS, **changes: Any) -> Options:
    """Return the user's settings."""
    return Options(
        script=SCRIPT, script_arguments=(*arguments, *more), runs_python=True, is_module=False, seed=0, **changes
    )


def coordinator(folder: Path, asked: Options) -> Coordinator:
    """Return a coordinator."""
    return Coordinator(asked, lambda: folder / CLUSTER)


def choice(layout: Layout, placement: tuple[int, ...] | None = None) -> Choice:
    """Return one configuration of the job."""
    return Choice(
        layout=layout,
        placement=placement or tuple(range(layout.world_size))[::-1],
        schedule="1f1b",
        step_time_s=1.0,
        breakdown_s={"compute": 1.0},
        memory=memory_need((1 << 20,) * layout.pp, 1 << 30),
        bound_s=1.0,
    )


def plan(
    *layouts: Layout, key: str = "k", hosts: tuple[str, ...] = ("node0", "node1"), keeps_own: bool = False
) -> Plan:
    """Return a plan with these candidates."""
    chosen, *others = layouts
    own = Layout(dp=chosen.world_size)
    return Plan(
        hosts=hosts,
        devices_per_host=chosen.world_size // len(hosts),
        device_kind="cpu",
        chosen=choice(chosen),
        alternatives=tuple(choice(layout) for layout in others),
        own=choice(own, tuple(range(own.world_size))),
        keeps_own=keeps_own,
        reasons=("It was written by hand.",),
        notes=(),
        num_layouts=1,
        dropped={},
        solve_s=0.0,
        provenance=Provenance(key=key, made_at="", versions={}, source="measured"),
    )


def standing_by(decision: Decision) -> tuple[str, ...]:
    """Return the hosts that run no workers."""
    return tuple(node.host for node in decision.standby)


def value(decision: Decision, flag: str) -> str | None:
    """Return the value of a flag in the script's arguments."""
    words = decision.script_arguments or ()
    return words[words.index(flag) + 1] if flag in words else None
