"""Thousands of agents towards one real first agent, on one machine.

`python -m benchmarks.bench_scale [--nodes 128,256,...] [--record]` writes all of scale.md, and goes on after an
interruption (`--log`). It forks one first agent, which decides with the real coordinator, and a few processes that play
the other agents: each agent is a thread that runs the product's own meeting, warm-up and end, with a store and
connections of its own. Measurements are drawn (`plan_machines`), and no worker runs.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import multiprocessing
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore

from benchmarks.plan_machines import WORDS, job_of, measured
from benchmarks.telling import processor
from pipette_launch import defaults
from pipette_launch.agent import membership, peers
from pipette_launch.agent import store as agent_store
from pipette_launch.agent.first_meeting import MeetingPlace
from pipette_launch.agent.membership import Membership
from pipette_launch.agent.phases import FirstIteration
from pipette_launch.agent.rendezvous import RendezvousSettings
from pipette_launch.agent.signature import Signer
from pipette_launch.agent.store import await_all, say_goodbye
from pipette_launch.agent.warmup import Warmup
from pipette_launch.defaults import PEER_WAIT_S
from pipette_launch.facts import Device, Host, Measurements, Plan, Provenance, files
from pipette_launch.facts.health import DeviceCondition
from pipette_launch.facts.measurements import LinkSurvey, layers_digest
from pipette_launch.facts.messages import Decision, NodeRecord, RunWarmup
from pipette_launch.launch.coordinator import Coordinator
from pipette_launch.launch.options import Options
from pipette_launch.launch.plan_reports import PlanDocuments, page_of, trace_of
from pipette_launch.planning.picture import picture_of
from pipette_launch.probe.messages import WarmupOrder
from pipette_launch.search.solve import SolveOptions, solve

NODES = (128, 256, 512, 1024, 2048)
LARGEST = 4096
"""Rows for this number of nodes are extrapolated, unless `--nodes` contains it."""
PLAYERS = 4
"""Processes that play agents."""
SIZE, DEVICE = 8, "NVIDIA A100-SXM4-80GB"
HERE = "127.0.0.1"
SECRET = b"the secret of all agents"
LOST_PART = 16
"""One of so many agents is lost at once."""
ASK_S = 0.05
"""Seconds between two questions to the first agent's store whose answers are timed."""
LOOK_S, WATCH_S = 0.1, 5.0
"""Seconds between two looks of an agent (torch's --monitor-interval), and seconds of each watched phase."""
WATCHED = ("watch warm-up", "watch training")
PHASES = ("join", "meet", "watch warm-up", "end warm-up", "plan", "start", "files", "watch training", "lose", "end")
CACHED = ("join", "meet", "watch training", "lose", "end")
"""Phases of a job whose plan comes from the cache."""
STARTS = ("join", "meet", "end warm-up", "plan", "start")
"""Phases from torch's rendezvous to the start of the training, beside measuring."""
STARTED = ("cold", "cached")
GROWS = ("first_s", "last_s", "cpu_s", "messages", "first_bytes", "most_bytes", "bytes")
HAND_ON_S = 60.0
"""Longest wait for a parent to hand on a text. The product waits for 2 s, but played agents share their cores."""
RESULTS = Path(__file__).parent / "results"
LOG = Path(tempfile.gettempdir()) / "bench_scale.jsonl"


# -- the job ------------------------------------------------------------------------------------------------------


def record(index: int) -> NodeRecord:
    """Return what an agent would say about a host of eight GPUs."""
    memory = 80 << 30
    # Identifiers of real devices and agents look random, and so cannot be compressed.
    digests = [hashlib.sha256(f"{index} {local}".encode()).digest()[:16] for local in range(SIZE)]
    uuids = [f"GPU-{uuid.UUID(bytes=digest)}" for digest in digests]
    devices = tuple(
        Device(
            kind="cuda", uuid=uuid, name="NVIDIA A100-SXM4-80GB", memory_total_bytes=memory, memory_free_bytes=memory
        )
        for uuid in uuids
    )
    conditions = tuple(
        DeviceCondition(
            uuid=uuid, used_bytes=0, sm_clock_hz=210_000_000, sm_clock_max_hz=1_410_000_000, clock_reasons=("GpuIdle",),
            ecc_volatile=0, ecc_aggregate=0, rows_correctable=0, rows_uncorrectable=0, rows_pending=False,
            rows_failed=False, nvlinks_up=12, nvlinks_total=12, pcie_width=16, pcie_width_max=16, pcie_generation=1,
            pcie_generation_max=4, persistence_mode=True, temperature_c=31,
        )
        for uuid in uuids
    )  # fmt: skip
    host = Host(
        name=f"gpu{index:05d}", address=f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}", cores=128, devices=devices
    )
    versions = {"torch": "2.9.1", "cuda": "12.8", "nccl": "2.27.5", "driver": "570.86.15", "megatron-core": "0.16.1"}
    return NodeRecord(
        token=digests[0][::-1].hex(), host=host, trouble="", num_slots=SIZE,
        node_rank=-1, script_digest="d" * 16, versions=versions, attempt=-1, verdict="none", failure=None,
        conditions=conditions, max_restarts=3,
    )  # fmt: skip


def options(num_nodes: int, cache: Path) -> Options:
    """Return the settings of a job that trains a GPT of 175B parameters."""
    words = (
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 "
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --sequence-parallel --micro-batch-size 1 "
        f"--global-batch-size {15 * num_nodes} --train-iters 1000 --lr 1e-4 --bf16 --use-distributed-optimizer "
        "--vocab-size 50257 --tokenizer-type NullTokenizer --mock-data --transformer-impl transformer_engine "
        "--attention-backend flash --overlap-grad-reduce --overlap-param-gather"
    ).split()
    return Options(
        script="pretrain_gpt.py", script_arguments=tuple(words), runs_python=True, is_module=False, cache=cache
    )


def measure(order: WarmupOrder) -> None:
    """Write drawn measurements, as the first worker of a warm-up does."""
    size = len(order.hosts)
    assert order.job is not None
    found = measured(order.job, size)
    survey = LinkSurvey(
        spread_HH=np.where(np.eye(size, dtype=bool), 0.0, np.random.default_rng(1).random((size, size)) * 0.05),
        origin_HH=tuple("m" * row + "-" + "m" * (size - row - 1) for row in range(size)),
    )
    files.write(
        Path(order.output),
        replace(
            found,
            cluster=replace(found.cluster, hosts=order.hosts, imagined=None),
            survey=survey,
            model_digest=layers_digest(order.job.model),
        ),
    )


# -- agents -------------------------------------------------------------------------------------------------------


class Counted:
    """A client of a store that counts messages and bytes, also for each store by its port."""

    def __init__(self, store: Any, port: int, counts: Counter[str]) -> None:
        self._store, self._port, self._counts = store, f"bytes {port}", counts

    def __getattr__(self, name: str) -> Any:
        do = getattr(self._store, name)

        def call(*args: Any) -> Any:
            self._counts["messages"] += 1
            answer = do(*args)
            sent = sum(len(one) for one in args if isinstance(one, str | bytes))
            self._counts[self._port] += sent + (len(answer) if isinstance(answer, bytes) else 8)
            return answer

        return call


class NoFinder:
    """Stands in for the threads of played agents that look for lost agents."""

    def __init__(self, _peers: Any, _connections: Any) -> None:
        self.peer, self.lost = None, ""

    def stop(self) -> None:
        """Do nothing."""


def play_within_one_process(counts: Counter[str]) -> None:
    """Let all agents of this process share results of reading equal texts, and count messages and bytes."""
    swap = membership.__dict__
    swap.update(PeerWatch=NoFinder, ReachSweep=NoFinder, HAND_ON_S=HAND_ON_S)
    swap["connected"] = lambda peer, within_s: Counted(peers.connected(peer, within_s=within_s), peer.port, counts)
    agent_store.within = peers.within = lambda _seconds, do: do()  # type: ignore[attr-defined]
    agent_store.HAND_ON_S = HAND_ON_S  # type: ignore[assignment, attr-defined]
    handed_on = agent_store.Reader._from_parent

    def counted(reader: agent_store.Reader, key: str, is_over: Callable[[], bool]) -> list[bytes]:
        began_s, has_parent = time.monotonic(), reader._patience_s > 0
        pieces = handed_on(reader, key, is_over)
        counts["late"] += has_parent and not pieces
        counts["slowest"] = max(counts["slowest"], int(1e3 * (time.monotonic() - began_s)))
        return pieces

    agent_store.Reader._from_parent = counted  # type: ignore[method-assign]
    alone = threading.Lock()

    def once(do: Callable[..., Any]) -> Callable[..., Any]:
        known: dict[Any, Any] = {}

        def call(*args: Any) -> Any:
            # The last argument is the name of the message in errors.
            with alone:
                if args[:-1] not in known:
                    known[args[:-1]] = do(*args)
            return known[args[:-1]]

        return call

    files.loads, files.inflate = once(files.loads), once(files.inflate)
    text_of = once(lambda data, key: agent_text(key, data))
    agent_text, agent_store._text = agent_store._text, lambda key, data: text_of(data, key)


@dataclass
class Agent:
    """One agent, played or real, phase by phase. It is also the controller of its warm-up."""

    index: int
    size: int
    coordinator: Coordinator | None = None
    measured_path: Path = Path("/nowhere")
    warmup_deadline_s: float = 600.0
    unwritten: list[Callable[[], None]] = field(default_factory=list)

    def join(self, store: Any) -> None:
        """Exchange addresses with all agents."""
        self.record = record(self.index)
        self.membership = Membership(self.record.token, HERE, -1, signer=Signer(SECRET))
        self.decision: Decision | None = None
        settings = RendezvousSettings(
            endpoint=f"{HERE}:29400",
            node_rank=-1,
            may_host_store=self.index == 0,
            least_nodes=self.size,
            most_nodes=self.size,
        )
        self.membership.join(MeetingPlace(store, settings, holds_store=self.index == 0))

    def meet(self) -> None:
        """Meet the other agents, and receive their decision."""
        decide: Any = self.coordinator and self.coordinator.decide
        self.decision, self.round = self.membership.meet(self.record, self.decision, decide=decide)
        self.iteration = FirstIteration(self.round, proven=False)
        self.start()
        self.process = SimpleNamespace(pid=0, code=None)
        self.process.poll = lambda: self.process.code
        self.warmup = Warmup(self, self.round, self.decision, self.record.token)  # type: ignore[arg-type]

    def start(self) -> None:
        """Find the store of RANK 0."""
        assert self.decision
        if self.decision.place_of(self.record.token) == 0:
            self.round.put(f"store/{self.decision.key}", "10.0.0.1 29500")
        self.decision.ranks_of(self.record.token)
        self.round.take(f"store/{self.decision.key}", what="the store of RANK 0", deadline_s=PEER_WAIT_S)

    def look_at_warmup(self) -> bool:
        """Look for the end of the warm-up."""
        return self.warmup._is_over({0: self.process})  # type: ignore[dict-item]

    def end_warmup(self) -> None:
        """End the worker, and wait for all nodes."""
        self.process.code = 0
        while not self.look_at_warmup():
            time.sleep(LOOK_S)

    def plan(self) -> None:
        """Receive the plan."""
        self.decision = self.warmup.following()

    def after_warmup(self, decision: RunWarmup, failure: str) -> Decision:
        """Plan, as the controller of the first agent does."""
        assert self.coordinator
        return self.coordinator.after_warmup(decision, failure)

    def look(self) -> bool:
        """Look as torch's loop and the agent do during a training."""
        self.iteration.share()
        return self.round.is_over() or self.round.is_over()

    def lose(self) -> None:
        """Leave, or meet after others left."""
        if self.index >= self.size - self.size // LOST_PART:
            self.membership.say_leaving("its agent was told to end")
            return
        while not self.look():
            time.sleep(LOOK_S)
        self.meet()

    def end(self) -> None:
        """Wait for all nodes, and leave."""
        if self.index < self.size - self.size // LOST_PART:
            assert self.decision
            await_all(self.round, "train", num_nodes=len(self.decision.tokens))
            say_goodbye(self.round, holds_store=self.coordinator is not None)

    def write_files(self) -> None:
        """Write the files that follow a decision. The product writes them in a thread beside the training."""
        while self.unwritten:
            self.unwritten.pop(0)()


def watch(looks: Sequence[Callable[[], bool]]) -> None:
    """Look every LOOK_S for WATCH_S; one thread looks for all agents of a process."""
    ends_s = time.monotonic() + WATCH_S
    while time.monotonic() < ends_s:
        next_s = time.monotonic() + LOOK_S
        for look in looks:
            look()
        time.sleep(max(0.0, next_s - time.monotonic()))


def steps(agent: Agent, store: Any) -> dict[str, Callable[[], Any]]:
    """Return the phases of an agent by name."""
    all_steps = (
        lambda: agent.join(store), agent.meet, agent.look_at_warmup, agent.end_warmup, agent.plan, agent.start,
        agent.write_files, agent.look, agent.lose, agent.end,
    )  # fmt: skip
    return dict(zip(PHASES, all_steps, strict=True))


# -- processes ----------------------------------------------------------------------------------------------------


def asker(desk: Any, slowest_s: Any) -> None:
    """Ask the first agent's store again and again, as an agent that watches it; note the longest wait for an answer."""
    while not desk.value:
        time.sleep(ASK_S)
    store = TCPStore(HERE, desk.value, is_master=False, wait_for_workers=False)
    while True:
        began_s = time.monotonic()
        store.check(["pipette"])
        slowest_s.value = max(slowest_s.value, time.monotonic() - began_s)
        time.sleep(ASK_S)


def first(
    size: int, names: Sequence[str], cache: Path, port: Any, barrier: Any, results: Any, desk: Any, slowest_s: Any
) -> None:
    """Run the real first agent; its store and its decisions are the product's own."""
    folder = Path(tempfile.mkdtemp(dir=cache))
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    unwritten: list[Callable[[], None]] = []
    coordinator = Coordinator(
        options(size, cache), lambda: folder / "cluster.json", least_nodes=size // 2, later=unwritten.append
    )
    agent = Agent(0, size, coordinator, unwritten=unwritten)
    barrier.wait()
    port.value = store.port
    barrier.wait()
    phases = steps(agent, store)
    for name in names:
        barrier.wait()
        before, began_s, slowest_s.value = os.times(), time.monotonic(), 0.0
        watch([phases[name]]) if name in WATCHED else phases[name]()
        mine_s = time.monotonic() - began_s
        barrier.wait()
        after = os.times()
        desk.value = agent.membership.server.port
        decision = agent.decision
        if name == "meet" and isinstance(decision, RunWarmup):
            order = files.loads(WarmupOrder, decision.order, "order")
            measure(replace(order, output=str(coordinator.measured_at())))
        text = files.dumps(decision) if decision else ""
        results.put({
            "first": name, "first_s": mine_s, "cpu_s": after.user + after.system - before.user - before.system,
            "files": len(list(Path("/proc/self/fd").iterdir())), "ports": [agent.membership.server.port, store.port],
            "answer_s": slowest_s.value, "decision": len(text), "phase": decision.phase if decision else "",
        })  # fmt: skip
    results.put({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024})


def player(size: int, names: Sequence[str], number: int, port: Any, barrier: Any, results: Any) -> None:
    """Play a share of the agents, each in a thread."""
    os.nice(10)
    threading.stack_size(1 << 18)
    counts: Counter[str] = Counter()
    play_within_one_process(counts)
    agents = [Agent(index, size) for index in range(1 + number, size, PLAYERS)]
    errors: list[str] = []
    barrier.wait()
    barrier.wait()
    stores = [TCPStore("localhost", port.value, is_master=False, wait_for_workers=False) for _ in agents]
    phases = [steps(agent, Counted(store, store.port, counts)) for agent, store in zip(agents, stores, strict=True)]

    def guarded(step: Callable[[], Any], ended: list[float]) -> None:
        try:
            step()
        except Exception as error:  # noqa: BLE001, the report counts it
            errors.append(f"{type(error).__name__}: {error}"[:200])
        ended.append(time.monotonic())

    for name in names:
        ended: list[float] = []
        counts.clear()
        doing = [phase[name] for phase in phases]
        if name in WATCHED:
            doing = [lambda looks=doing: watch(looks)]  # type: ignore[misc]
        threads = [threading.Thread(target=guarded, args=(one, ended), daemon=True) for one in doing]
        barrier.wait()
        began_s, before = time.monotonic(), time.process_time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_s = max(ended) - began_s
        results.put({
            "player": name, "last_s": took_s, **counts, "errors": errors[:1], "failed": len(errors),
            "their_cpu_s": time.process_time() - before,
        })  # fmt: skip
        errors.clear()
        barrier.wait()


def look_up_names_in_files() -> None:
    """Ask no name server: torch's store looks up the name of each client, in the thread that serves all clients."""
    ctypes.CDLL(None)["__nss_configure_lookup"](b"hosts", b"files")


def run(size: int, cache: Path, names: Sequence[str] = PHASES) -> dict[str, Any]:
    """Run one job of `size` agents, and return the figures by phase."""
    look_up_names_in_files()
    # A store needs 9 descriptors, and each of its clients one.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    context = multiprocessing.get_context("fork")
    port, barrier, results = context.Value("i", 0), context.Barrier(1 + PLAYERS), context.Queue()
    desk, slowest_s = context.Value("i", 0), context.Value("d", 0.0)
    processes = [
        context.Process(target=first, args=(size, names, cache, port, barrier, results, desk, slowest_s)),
        context.Process(target=asker, args=(desk, slowest_s)),
    ]
    processes += [context.Process(target=player, args=(size, names, n, port, barrier, results)) for n in range(PLAYERS)]
    for process in processes:
        process.start()
    found: dict[str, Any] = {name: defaultdict(float) for name in names}
    for _ in range(len(names) * (1 + PLAYERS) + 1):
        told = results.get(timeout=1800)
        if "peak" in told:
            found["peak"] = told["peak"]
        elif "first" in told:
            found[told.pop("first")].update(told)
        else:
            row = found[told.pop("player")]
            row["last_s"] = max(row["last_s"], told["last_s"])
            row["errors"] = row["errors"] or told["errors"]
            row["slowest"] = max(row["slowest"], told.pop("slowest", 0))
            for key, amount in ({"messages": 0, "late": 0} | told).items():
                if key not in ("last_s", "errors"):
                    row[key] += amount
    for name in names:
        sent = {key: found[name].pop(key) for key in list(found[name]) if key.startswith("bytes ")}
        firsts = {f"bytes {port}" for port in found[name].pop("ports")}
        found[name]["bytes"] = sum(sent.values())
        found[name]["first_bytes"] = sum(amount for key, amount in sent.items() if key in firsts)
        found[name]["most_bytes"] = max((amount for key, amount in sent.items() if key not in firsts), default=0)
    processes[1].kill()
    for process in processes:
        process.join(20)
        if process.is_alive():
            process.kill()
    return found


# -- documents ----------------------------------------------------------------------------------------------------


def documents(size: int, folder: Path) -> Iterator[str]:
    """Lines of markdown: size and seconds of each document of a plan for `size` hosts."""
    cluster, plan_at, page, trace = (folder / name for name in ("cluster.json", "plan.json", "page.html", "trace.json"))
    hosts = tuple(host for index in range(size) if (host := record(index).host))
    order: Any = SimpleNamespace(hosts=hosts, job=job_of(size), output=str(cluster))
    yield from timed(size, cluster, "drawn and written", lambda: measure(order))
    found = yield from timed(size, cluster, "read and checked", lambda: files.read(cluster, Measurements))
    yield from timed(size, cluster, "written", lambda: files.write(cluster, found))
    provenance = Provenance(key="bench", made_at="", versions={}, source="measured")
    plan = solve(order.job, found, options=SolveOptions(budget_s=10.0), clock=time.monotonic, provenance=provenance)
    yield from timed(size, plan_at, "written", lambda: files.write(plan_at, plan))
    yield from timed(size, plan_at, "read and checked", lambda: files.read(plan_at, Plan))
    made = PlanDocuments(plan=plan, measurements=found, picture=picture_of(plan, order.job, found))
    yield from timed(size, page, "written", lambda: page.write_text(page_of(made)))
    yield from timed(size, trace, "written", lambda: trace.write_text(trace_of(made)))
    yield f"| {size:,} | {page.name} | {page.stat().st_size / 1e6:.2f} MB | in Chromium: {loaded(page)} | | | |"


def loaded(page: Path) -> str:
    """Load a page in headless Chromium; return the page's own seconds until it is loaded, and its heap."""
    script = (
        "<script>addEventListener('load', () => setTimeout(() => document.title = 'loaded in ' + (performance.timing."
        "loadEventEnd - performance.timing.navigationStart) / 1e3 + ' s, heap of ' + Math.round("
        "performance.memory.usedJSHeapSize / 1e6) + ' MB'))</script>"
    )
    shown = page.with_name("shown.html")
    shown.write_text(script + page.read_text())
    words = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-precise-memory-info",
        "--virtual-time-budget=5000",
    )
    command = ["chromium", *words, "--dump-dom", shown.as_uri()]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = re.search(r"loaded in [^<']*MB", done.stdout)
    return found[0] if found else "not loaded"


def timed(size: int, path: Path, what: str, do: Callable[[], Any]) -> Generator[str, None, Any]:
    """Do something, yield its row, and return its result."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    result = do()
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    megabytes = path.stat().st_size / 1e6
    yield f"| {size:,} | {path.name} | {megabytes:.2f} MB | {what} | {took_s:.2f} s | {cpu_s:.2f} s | {peak:.1f} GiB |"
    return result


# -- the report ---------------------------------------------------------------------------------------------------


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Return the exponent of growth, by least squares through the logarithms."""
    x, y = np.log(np.array(points)).T
    return float(np.polyfit(x, y, 1)[0])


def table(found: dict[int, dict[str, Any]], names: Sequence[str]) -> Iterator[str]:
    """Lines of markdown: one row for each phase and number of nodes, and the growth of each phase."""
    yield (
        "| phase | nodes | first agent | last agent | its CPU | CPU of a played agent | messages "
        "| MB, first agent | MB, another | MB, all | hand-on | late | failed | slowest answer |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for name in names:
        rows = {size: one[name] for size, one in sorted(found.items()) if name in one}
        for size, row in rows.items():
            answer = f"{row['answer_s']:.2f} s" if row["answer_s"] else ""
            yield (
                f"| {name} | {size:,} | {row['first_s']:.2f} s | {row['last_s']:.2f} s | {row['cpu_s']:.2f} s "
                f"| {1e3 * row['their_cpu_s'] / size:.1f} ms | {row['messages']:,.0f} | {row['first_bytes'] / 1e6:.1f} "
                f"| {row['most_bytes'] / 1e6:.1f} | {row['bytes'] / 1e6:.1f} | {row['slowest'] / 1e3:.2f} s "
                f"| {row['late']:.0f} | {row['failed']:.0f} | {answer} |"
            )
        if len(rows) > 1:
            first, last, cpu, *others = (f"N^{grows(rows, key):.1f}" for key in GROWS)
            yield f"| {name} | **growth** | {first} | {last} | {cpu} | | {' | '.join(others)} | | | | |"
            at = {key: max(rows[max(rows)][key], 1e-3) * (LARGEST / max(rows)) ** grows(rows, key) for key in GROWS}
            if max(rows) < LARGEST:
                yield (
                    f"| {name} | {LARGEST:,}, extrapolated | | | {at['cpu_s']:.1f} s | | {at['messages']:,.0f} "
                    f"| {at['first_bytes'] / 1e6:,.0f} | {at['most_bytes'] / 1e6:,.0f} | {at['bytes'] / 1e6:,.0f} "
                    f"| | | | |"
                )


def grows(rows: dict[int, Any], key: str) -> float:
    """Return the exponent of growth of a figure over the sizes of a phase."""
    return exponent([(size, max(row[key], 1e-3)) for size, row in rows.items()])


def summary(found: dict[int, dict[str, Any]], names: Sequence[str]) -> Iterator[str]:
    """Lines of markdown: memory, descriptors, decisions, and seconds without the watched phases, for each size."""
    yield (
        "| nodes | to the training | CPU of the first agent | CPU of all played agents | peak memory | descriptors "
        "| JSON of the decision |"
    )
    yield "|--:|--:|--:|--:|--:|--:|---|"
    starts = [name for name in names if name in STARTS]
    for size, one in sorted(found.items()):
        start, cpu, theirs = (sum(one[name][key] for name in starts) for key in ("last_s", "cpu_s", "their_cpu_s"))
        decisions = ", ".join(f"{one[name]['phase']} {one[name]['decision'] / 1e6:.2f} MB" for name in names[1:2])
        most = max(one[name]["files"] for name in names)
        yield (
            f"| {size:,} | {start:.1f} s | {cpu:.1f} s | {theirs:.1f} s | {one['peak'] / 2**20:.0f} MiB | {most:,} "
            f"| {decisions} |"
        )


def conditions(known: dict[tuple[str, int], Any]) -> str:
    """Return the conditions of the runs."""
    loads = [load for one in known.values() for load in one["load"]]
    return (
        f"`python -m benchmarks.bench_scale --record` on {time.strftime('%Y-%m-%d')}: {processor()}, "
        f"{len(os.sched_getaffinity(0))} cores for the first agent, {PLAYERS} processes that play the other agents, "
        f"and other users of the machine (load average {min(loads):.0f} to {max(loads):.0f}, which contains the played "
        f"agents); Python {platform.python_version()}, torch {torch.__version__}; loopback; names from /etc/hosts only."
    )


REMARKS = f"""**Measured**: a real first agent with the product's coordinator, search and store, and all messages of all
agents, each with a store and connections of its own. **Played**: the other agents share {PLAYERS} processes, decode
equal texts once in each process, wait up to {HAND_ON_S:g} s for an agent that hands a text on (the product waits
{defaults.HAND_ON_S:g} s for each), and look for no lost agents. **Not run**:
workers, measuring, and a network. **Extrapolated**: rows that say so, by the growth of the measured rows.

The first agent and the played agents share the cores. So seconds of the clock are too long, and most of them are the
played agents' CPU seconds. On nodes of their own, the first agent needs about its CPU seconds, and each other agent
needs the milliseconds of a played agent. The search ends after 10 s of the clock, so it gets fewer CPU seconds on a
busy machine.

One agent in {LOST_PART} leaves in the phase `lose`, whose time contains a search for the remaining nodes. The phase
`files` writes measurements, report and trace; the product writes them beside the training. A watched phase lasts
{WATCH_S:g} s; its messages are the messages of that time. Peak memory contains the drawing of the measurements.

MB count both directions: at the store of the first agent, at the other store with the most bytes, and at all stores. In
the phase `join`, the first agent's store contains the store of torch's rendezvous. The column `late` has the number of
long texts that an agent read in the first agent's store, because no other agent had handed the text on. The column
`hand-on` has the longest time until an agent had a text from another agent. The column `slowest answer` has the longest
wait of one more process that asks the first agent's store 20 times a second. If no answer came for
{defaults.HOST_SILENCE_S:g} s, agents would believe the first agent lost.
"""


def report(known: dict[tuple[str, int], Any]) -> str:
    """Return the whole report."""
    cold, cached = ({size: one["found"] for (what, size), one in known.items() if what == kind} for kind in STARTED)
    rows = [row for (what, _), one in known.items() if what == "documents" for row in one["found"]]
    parts = ["# Thousands of nodes by their messages", conditions(known), REMARKS, WORDS]
    for title, found, names in (("A cold start", cold, PHASES), ("A start from the cache", cached, CACHED)):
        parts += [f"## {title}", "\n".join(summary(found, names)), "\n".join(table(found, names))]
    return "\n\n".join([*parts, "## Documents", ON_DOCUMENTS, "\n".join([*DOCUMENTS, *rows])]) + "\n"


DOCUMENTS = ("| hosts | document | size | step | wall clock | CPU | peak memory |", "|--:|---|--:|---|--:|--:|--:|")
ON_DOCUMENTS = (
    "Every link has random digits, as if all links had been measured: the largest `cluster.json`. Only the deciding "
    "node reads `cluster.json`; the other nodes get the decision, which contains the plan."
)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", default=",".join(map(str, NODES)), help="sizes, comma-separated")
    parser.add_argument("--documents", default="1280,4096", help="hosts of the plans whose documents are timed")
    parser.add_argument("--record", action="store_true", help="write the report into benchmarks/results")
    parser.add_argument("--log", type=Path, default=LOG, help="file with a line for each finished size, to resume")
    args = parser.parse_args()
    done = [json.loads(line) for line in args.log.read_text().splitlines()] if args.log.exists() else []
    known = {(one["what"], one["size"]): one for one in done}

    def once(what: str, size: int, do: Callable[[], Any]) -> None:
        if (what, size) in known:
            return
        began_s, load = time.monotonic(), os.getloadavg()[0]
        found = do()
        stolen = {"load": [load, os.getloadavg()[0]], "took_s": time.monotonic() - began_s}
        known[what, size] = {"what": what, "size": size, "found": found, **stolen}
        with args.log.open("a") as log:
            log.write(json.dumps(known[what, size]) + "\n")

    def start(size: int) -> None:
        with tempfile.TemporaryDirectory() as cache:
            for what, names in zip(STARTED, (PHASES, CACHED), strict=True):
                once(what, size, lambda names=names: run(size, Path(cache), names))  # type: ignore[misc]

    for size in map(int, filter(None, args.nodes.split(","))):
        if ("cached", size) not in known:
            known.pop(("cold", size), None)  # The cache of an interrupted run is gone.
            start(size)
    for size in map(int, filter(None, args.documents.split(","))):
        with tempfile.TemporaryDirectory() as folder:
            once("documents", size, lambda folder=folder, size=size: [*documents(size, Path(folder))])  # type: ignore[misc]
    text = report(known)
    sys.stdout.write(text)
    if args.record:
        (RESULTS / "scale.md").write_text(text, encoding="utf-8")
        args.log.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
