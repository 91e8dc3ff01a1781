"""The manifests' commands, given the variables that the operators inject (read in their code): who meets where."""

from __future__ import annotations

import json
import re
import runpy
import socket
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipette_launch import cli
from pipette_launch.agent.rendezvous import settings_of
from pipette_launch.cli import launcher

if TYPE_CHECKING:
    from argparse import Namespace

FOLDER = Path(__file__).parent.parent.parent / "examples" / "kubernetes"
PYTORCHJOB = {
    "PYTHONUNBUFFERED": "0",
    "PET_RDZV_ENDPOINT": "pretrain-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d",
    "PET_NNODES": "4:4",
    "PET_MAX_RESTARTS": "3",
    "PET_RDZV_ID": "pretrain",
}
TRAINJOB = {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "pretrain-node-0-0.pretrain",
    "PET_MASTER_PORT": "29500",
}
SCRIPT = ["--save", "/shared/checkpoints", "--load", "/shared/checkpoints"]


def parsed(monkeypatch: pytest.MonkeyPatch, manifest: str, **variables: str) -> Namespace:
    """What our parser makes of a manifest's command."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def unknown(*_: object, **__: object) -> list[object]:
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    text = (FOLDER / manifest).read_text()
    command, arguments = (json.loads(found) for found in re.findall(r"(?:command|args): (\[.*\])", text))
    assert command[0] == "pipette-launch"
    return launcher.parser().parse_args([*command[1:], *arguments])


def test_a_pytorchjob(monkeypatch: pytest.MonkeyPatch) -> None:
    """The v1 operator's elastic policy becomes a c10d rendezvous at worker 0; the command names the GPUs."""
    args = parsed(monkeypatch, "pytorchjob.yaml", **PYTORCHJOB)
    settings = settings_of(args)

    assert ("4:4", "8", "c10d", "pretrain", 3) == (
        args.nnodes,
        args.nproc_per_node,
        args.rdzv_backend,
        args.rdzv_id,
        args.max_restarts,
    )
    assert ("pretrain-worker-0:23456", -1, 4) == (settings.endpoint, settings.node_rank, settings.least_nodes)
    assert ("pretrain_gpt.py", SCRIPT) == (args.training_script, args.training_script_args)


@pytest.mark.parametrize(("rank", "is_host"), [("0", "true"), ("3", "false")])
def test_a_trainjob(monkeypatch: pytest.MonkeyPatch, rank: str, is_host: str) -> None:
    """The v2 trainer names nodes as static rendezvous does: node 0 hosts the store, at the address given to all."""
    args = parsed(monkeypatch, "trainjob.yaml", PET_NODE_RANK=rank, **TRAINJOB)
    settings = settings_of(args)

    assert (4, 4, "8") == (settings.least_nodes, settings.most_nodes, args.nproc_per_node)
    assert ("pretrain-node-0-0.pretrain:29500", int(rank)) == (settings.endpoint, settings.node_rank)
    assert (is_host == "true") == settings.must_host == (not settings.is_client)
    assert ("pretrain_gpt.py", SCRIPT) == (args.training_script, args.training_script_args)


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m pipette_launch` and `pipette-launch` run the same function."""
    (command,) = entry_points(group="console_scripts", name="pipette-launch")
    assert launcher.main is command.load()

    called: list[str] = []
    monkeypatch.setattr(cli, "main", lambda: called.append("main"))
    runpy.run_module("pipette_launch", run_name="__main__")

    assert ["main"] == called
