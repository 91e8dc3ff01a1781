"""Every flag of the installed torchrun, given to both launchers with a script that is not Megatron's: alike in all."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import warm
from end_to_end.jobs import ROOT, environment, free_port
from torch.distributed.run import get_args_parser

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = [pytest.mark.timeout(120), pytest.mark.processes]
SEEN = Path(__file__).parent / "seen.py"
LAUNCHERS = ("torch.distributed.run", "pipette_launch")
PATIENCE_S = 50.0
INTERVAL_S = 10.0
USUAL_SHUTDOWN_S = 30.0
RANDOM = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|(?<=_)[a-z0-9_]{8}(?=/|$)")
"""Run ids that torchrun makes up, and the ends of its log folders' names."""
CHANGING = {"MASTER_ADDR", "MASTER_PORT", "PORT", "SEEN", "TMPDIR", "XDG_CACHE_HOME"}
"""What differs from run to run, or is the test's own. Each phase of ours has a store of its own, at an address that all
nodes reach: `store_hears` says that it is one, and --local-addr names it."""


@dataclass(frozen=True)
class Launch:
    """Flags that are tried together, and what becomes of the workers."""

    flags: tuple[str, ...]
    """With {folder}, {port}, {node} and {slots}, the number of workers of the node, filled in."""
    script: tuple[str, ...] = (str(SEEN), "--some", "words")
    num_nodes: int = 1
    code: int | None = 0
    """What torchrun's own is; None = whatever torch makes of this machine."""
    variables: Mapping[str, str] = field(default_factory=dict)

    def words(self, folder: Path, port: int, node: int) -> list[str]:
        """The command line of one node."""
        filled = {"folder": folder, "port": port, "node": node, "slots": node + 1}
        return [flag.format(**filled) for flag in self.flags] + list(self.script)

    def parsed(self, node: int = 0) -> Namespace:
        """As torchrun reads it."""
        words = self.words(Path("folder"), 1, node)
        return get_args_parser().parse_args([word for word in words if word not in self.unknown])

    @property
    def unknown(self) -> list[str]:
        """Flags that an older torch lacks."""
        known = get_args_parser()._option_string_actions
        return [flag for flag in self.flags if flag.partition("=")[0] not in known]


MEETINGS = ("RENDEZVOUS", "ASSIGN_WORKER_RANKS")
LAUNCHES = {
    "nodes": Launch(
        (
            "--nnodes=2",
            "--nproc-per-node={slots}",
            "--node-rank={node}",
            "--master-addr=localhost",
            "--master-port={port}",
            "--role=role{node}",
        ),
        num_nodes=2,
    ),
    "restarts": Launch(
        (
            "--nnodes=1:2",
            "--nproc-per-node=2",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:{port}",
            "--rdzv-id=job7",
            "--rdzv-conf=join_timeout=60,last_call_timeout=1",
            "--local-addr=127.0.0.2",
            "--max-restarts=1",
            "--virtual-local-rank",
            "--event-log-handler=console",
        ),
        variables={"FAILS_IN": "0"},
    ),
    "logs": Launch(
        (
            "--standalone",
            # Both are overruled by --standalone.
            "--rdzv-id=overruled",
            "--master-port={port}",
            "--nproc-per-node=2",
            "--log-dir={folder}/logs",
            "--redirects=0:2",
            "--tee=1:3",
            "--local-ranks-filter=1",
            "--duplicate-stdout-filters=apple",
            "--duplicate-stderr-filters=plum",
            f"--monitor-interval={INTERVAL_S}",
            "--module",
        ),
        script=("seen", "--some", "words"),
        variables={"PYTHONPATH": f"{environment(Path())['PYTHONPATH']}:{SEEN.parent}"},
    ),
    "functions": Launch(
        ("--nproc-per-node=2", "--run-path", "--start-method=fork", "--logs-specs=asked"),
        code=1,
        variables={"FAILS_IN": "0"},
    ),
    "signals": Launch(
        ("--nproc-per-node=2", "--signals-to-handle=SIGUSR1", "--shutdown-timeout=1", "--no-python"),
        script=(sys.executable, str(SEEN), "--some", "words"),
        code=1,
        variables={"WAITS": "yes"},
    ),
    # Without a GPU torch has no binding: it must be torch itself that says so.
    "binding": Launch(("--nproc-per-node=2", "--numa-binding=node"), code=None),
}
ASKED = """
from pathlib import Path
from os import environ
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs


class Asked(DefaultLogsSpecs):
    def reify(self, envs):
        Path(environ["SEEN"], "asked").write_text(str(sorted(envs)))
        return super().reify(envs)
"""


def test_every_flag_is_tried() -> None:
    """A flag that a newer torch adds fails here until a launch gives it another value than its default."""
    tried = {
        name
        for launch in LAUNCHES.values()
        for name, value in vars(launch.parsed(launch.num_nodes - 1)).items()
        if value != get_args_parser().get_default(name)
    }

    assert {action.dest for action in get_args_parser()._actions} - {"help"} == tried


@pytest.mark.parametrize("name", LAUNCHES)
def test_all_is_as_under_torchrun(tmp_path: Path, name: str) -> None:
    """Exit code, workers' words, variables and argv, what the console shows, files and events are torchrun's own."""
    if LAUNCHES[name].unknown:
        pytest.skip(f"this torchrun lacks {', '.join(LAUNCHES[name].unknown)}")
    jobs = {launcher: Job(launcher, LAUNCHES[name], tmp_path / launcher) for launcher in LAUNCHERS}
    if "WAITS" in LAUNCHES[name].variables:
        for job in jobs.values():
            job.interrupt()

    with ThreadPoolExecutor() as pool:
        stock, ours = pool.map(Job.finish, jobs.values())

    assert LAUNCHES[name].code in (stock["code"], None), stock
    assert {} == {
        what: (stock.get(what), ours.get(what)) for what in {*stock, *ours} if stock.get(what) != ours.get(what)
    }


def flat(tree: object, name: str = "") -> dict[str, object]:
    """Name each leaf of nested dictionaries by its path, so that a failure shows only what differs."""
    if not isinstance(tree, dict) or not tree:
        return {name: tree}
    parts = [flat(value, f"{name}/{key}" if name else str(key)) for key, value in tree.items()]
    return {path: leaf for part in parts for path, leaf in part.items()}


class Job:
    """One launcher on every node of a job, and what it left."""

    def __init__(self, launcher: str, launch: Launch, folder: Path) -> None:
        self._launch = launch
        self._folder = folder
        self._seen = folder / "seen"
        self._seen.mkdir(parents=True)
        self._port = free_port()
        (folder / "asked.py").write_text(ASKED)
        info = folder / "asked-1.dist-info"
        info.mkdir()
        (info / "entry_points.txt").write_text("[torchrun.logs_specs]\nasked = asked:Asked\n")
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: asked\nVersion: 1\n")
        own = {**launch.variables, "SEEN": str(self._seen), "PORT": str(self._port)}
        variables = {**environment(folder), **warm.environment([ROOT, ROOT / "patches"]), **own}
        variables["PYTHONPATH"] += f":{folder}"
        self._processes = [
            subprocess.Popen(
                warm.command(launcher, *launch.words(folder, self._port, node)),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=variables,
                cwd=folder,
            )
            for node in range(launch.num_nodes)
        ]

    def interrupt(self) -> None:
        """Send the first node SIGUSR1 once its workers are there."""
        ends_s = time.monotonic() + PATIENCE_S
        while len(list(self._seen.glob("ready-*"))) < int(self._launch.parsed().nproc_per_node):
            assert time.monotonic() < ends_s, "no workers"
            assert self._processes[0].poll() is None, self._processes[0].communicate()
            time.sleep(0.05)
        self._processes[0].send_signal(signal.SIGUSR1)

    def finish(self) -> dict[str, object]:
        """Wait for the end; returns all that can be compared."""
        spoken = [self._end(process) for process in self._processes]
        ended_s = time.time()
        lines = [line for out, err in spoken for line in (*out.splitlines(), *err.splitlines())]
        records = {path.stem: json.loads(path.read_text()) for path in sorted(self._seen.glob("*.json"))}
        named = self._launch.parsed().local_addr is not None
        lasts_s = ended_s - max((record.pop("at_s") for record in records.values()), default=ended_s)
        return flat(
            {
                "code": max(process.returncode for process in self._processes),
                "workers": {worker: self._known(record) for worker, record in records.items()},
                "addresses": {record["variables"]["MASTER_ADDR"] for record in records.values() if named},
                "out": sorted(self._known(line) for out, _ in spoken for line in out.splitlines()),
                "err": sorted(self._known(line) for _, err in spoken for line in err.splitlines() if "said: " in line),
                "files": self._files(),
                "events": self._events(lines),
                "last words": [line for line in lines if line.startswith("AssertionError")],
                # Only where the flag is given: without it a loaded machine may take as long to end.
                "waits for an interval": self._launch.parsed().monitor_interval == INTERVAL_S
                and lasts_s > INTERVAL_S - 1,
                "waits for a shutdown": lasts_s > USUAL_SHUTDOWN_S - 5,
            }
        )

    def _end(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        try:
            return process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            for one in self._processes:
                one.kill()
            raise

    def _known(self, found: object) -> object:
        """What was found, without what differs from run to run."""
        if isinstance(found, str):
            return RANDOM.sub("RANDOM", found.replace(str(self._folder), "FOLDER").replace(str(self._port), "PORT"))
        if isinstance(found, dict):
            return {name: self._known(value) for name, value in found.items() if name not in CHANGING}
        return [self._known(value) for value in found] if isinstance(found, list) else found

    def _files(self) -> dict[object, object]:
        """What lies in the log folder, and what workers and log specs left of themselves."""
        logs = [path for path in (self._folder / "logs").rglob("*") if path.is_file()]
        left = [path for path in self._seen.iterdir() if path.suffix != ".json"]
        return {self._known(str(path)): sorted(path.read_text().splitlines()) for path in (*logs, *left)}

    def _events(self, lines: list[str]) -> object:
        events = [json.loads(line) for line in lines if line.startswith('{"name"')]
        counts = Counter((one["name"], one["source"], one["metadata"]["agent_restarts"]) for one in events)
        # After a failure our agents meet without torch's rendezvous, which then tells of nothing.
        return {key: count for key, count in counts.items() if not (key[2] and key[0].endswith(MEETINGS))}
