"""What reads foreign input, each reader as a function of bytes that raises nothing but the project's own errors."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import pickle
import socket
import tempfile
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import screens
from facts_for_tests import nodes, tiny_cluster, tiny_job, tiny_measurements
from launch.worlds import choice, plan, records
from megatron_lines import SMALL

from pipette_launch.agent.rendezvous import check_meeting, settings_of
from pipette_launch.agent.warmup import NodeReport, WorkerState
from pipette_launch.errors import MegatronError, PipetteError
from pipette_launch.facts import Layout, Samples, files
from pipette_launch.facts.devices import KNOWN_DEVICES, DeviceFiles, file_of
from pipette_launch.facts.fabric import FabricSpec, Tier
from pipette_launch.facts.health import Checkup, Finding, Verdict
from pipette_launch.facts.messages import (
    Advice,
    Arrival,
    Dimension,
    Failure,
    Invitation,
    MeasuringQuestion,
    Member,
    Members,
    RunTraining,
    RunTrial,
    RunWarmup,
    StageCase,
    Stop,
    TrialReport,
)
from pipette_launch.facts.outcome import LiveJob, Outcome, PeakReading
from pipette_launch.facts.plan import Shortage
from pipette_launch.facts.prediction import Explained, Explanation
from pipette_launch.facts.schedule import ScheduleFile, schedule_of
from pipette_launch.launch.training import OutcomeTracker
from pipette_launch.megatron import read_job
from pipette_launch.megatron.flags import Arguments
from pipette_launch.megatron.logs import (
    exception_in,
    explain_failure,
    failure_of,
    parse_iteration,
    parse_memory,
    why_no_plan_helps,
)
from pipette_launch.megatron.tokenizers import read_vocabulary
from pipette_launch.planning.machines import machines_of
from pipette_launch.probe.health.inventory import switches
from pipette_launch.probe.messages import WarmupOrder, WorkerResult
from pipette_launch.probe.progress import PhaseEnd, Sign
from pipette_launch.report.live import live_line, live_screen
from pipette_launch.report.measured import measured_screen
from pipette_launch.report.plan import plan_file_screen

Reader = Callable[[bytes], object]
HERE = Path(__file__).parent
CLUSTER = tiny_cluster()
MEASURED = tiny_measurements(CLUSTER)
CHOICE = choice(Layout(pp=2, dp=2))
PLAN = plan(Layout(pp=2, dp=2), Layout(tp=2, dp=2))
ORDER = ScheduleFile.of(schedule_of(Layout(pp=2), 4))
SHORTAGE = Shortage(
    layout=CHOICE.layout, need_bytes=6, free_bytes=10, cause="out of memory", noticed_at="2026-11-24T00:00:00+00:00"
)
TOLD = Failure(cause="out of memory", kind="out-of-memory", flags=("--seed",), rank=1, exit_code=-9)
OUTCOME = Outcome(
    key="0123456789abcdef",
    layout=CHOICE.layout,
    placement=CHOICE.placement,
    predicted_step_s=1.0,
    measured_step=Samples(values_s=(1.0, 1.1)),
    first_iteration=1,
    last_iteration=20,
    losses=("1.0", ""),
    configuration_digest="a",
    peaks=(PeakReading(rank=0, pp_rank=0, predicted_bytes=1, measured_bytes=2, source="allocator"),),
)
WORKER = WorkerState(
    slot=0, name="a:0", pid=1, exit_code=1, status="dead", where="links", advance=1, silent_s=0.0, idle_s=0.0,
    is_overdue=False, waits_for="", peers=(1,), error="",
)  # fmt: skip
FABRIC = FabricSpec(
    source="Written by hand.",
    tiers=(Tier(name="leaf", hosts_per_group=2), Tier(name="spine", share=0.5, latency_s=1e-5)),
    hosts=("a", "b", "c", "d"),
    network_factor={"a": 0.5},
    compute_factor={"b": 0.9},
)
DEVICE = file_of(KNOWN_DEVICES["H20"])
SAVED_TO = Path("here")
MEMBER = Member(token="t", address="10.0.0.1", port=29400, node_rank=0)  # noqa: S106, it is a name
LIVE = LiveJob(
    read_s=1e9,
    written_s=1e9,
    phase="training",
    began_s=1.0,
    phase_began_s=2.0,
    warmup_phase_s={"start": 1.0},
    layout="dp2",
    predicted_step_s=1.0,
    own_predicted_step_s=2.0,
    step_s=1.5,
    iteration=3,
    iterations=10,
    printed_s=4.0,
    memory_need_bytes=5,
    memory_limit_bytes=6,
    verdicts=(Verdict(kind="slow-link", host="a", figure="1"),),
)
DOCUMENTS: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "plan": (PLAN, lambda made: plan_file_screen(made, title="", saved_to=SAVED_TO)),
    "cluster": (MEASURED, lambda made: measured_screen(made, title="", saved_to=SAVED_TO)),
    "outcome": (
        OUTCOME,
        lambda made: (made.log_step_error, made.log_memory_error),
    ),
    "shortage": (SHORTAGE, lambda made: (made.sentence, made.margin(0.08), made.leaner(PLAN))),
    "live-job": (LIVE, lambda made: (live_screen(made, (0.5, 0.6)), live_line(made))),
    "explained": (Explained(keys=(Explanation(key="gap", what="w", unit="", how="h", source="s", value=""),)), str),
    "fabric": (FABRIC, lambda made: machines_of(world_size=32, nodes=4, gpu="h100-sxm", fabric=made)),
    "device": (DEVICE, lambda made: machines_of(world_size=32, nodes=4, gpu=made)),
    "devices": (DeviceFiles(devices=(DEVICE,)), str),
    "schedule": (ORDER, ScheduleFile.schedule),
    "prediction": (screens.prediction(), str),
    "checkup": (
        Checkup(host="a", taken_at="now", findings=(Finding(severity="fine", what="cache", value="there"),)),
        lambda made: made.is_fit,
    ),
    "question": (MeasuringQuestion(job=tiny_job(), measurements=MEASURED, budget_s=1.0), str),
    "advice": (
        Advice(
            dimensions=(Dimension(name="dp", kinds=("all_reduce",), groups=((0, 1),)),),
            stages=(StageCase(layout=Layout(pp=2), pp_rank=1),),
        ),
        str,
    ),
    "node": (records(1, failure=TOLD)[0], str),
    "decision-train": (
        RunTraining(nodes=nodes("node0", "node1", num_slots=2), plan=PLAN, failures=(TOLD,), shortage=SHORTAGE),
        lambda made: [made.choice, *(made.ranks_of(token) for token in made.tokens)],
    ),
    "decision-warmup": (RunWarmup(nodes=nodes("a"), order="{}"), lambda made: made.ranks_of("a")),
    "decision-trial": (
        RunTrial(nodes=nodes("node0", "node1", num_slots=2), plan=PLAN, trial=0, iterations=3),
        lambda made: [made.choice, *(made.ranks_of(token) for token in made.tokens)],
    ),
    "decision-stop": (Stop(nodes=(), failed=True), str),
    "member": (MEMBER, str),
    "members": (Members(generation="g", members=(MEMBER,)), str),
    "invitation": (Invitation(leader=MEMBER, is_signed=True), str),
    "arrival": (Arrival(meeting=1, record=records(1)[0], held=""), str),
    "trial-report": (TrialReport(step_s=(1.0,), failure=TOLD, took_s=2.0), str),
    "sign": (Sign(phase="links", at_s=1.0, limit_s=2.0, ended=(PhaseEnd(phase="a", seconds=1.0, words=""),)), str),
    "probe-options": (
        WarmupOrder(
            job=tiny_job(),
            hosts=CLUSTER.hosts,
            cases=(MEASURED.compute[0].case,),
            output="out",
            progress_dir="signs",
            message_sizes_bytes=(8, 64, 512),
            script=("train.py",),
        ),
        str,
    ),
    "probe-result": (WorkerResult(slot=0, compute=MEASURED.compute[:1], phase_s={"links": 1.0}), str),
    "warm-up-report": (NodeReport(workers=(WORKER,), output="folder"), str),
}
"""A document of each kind, and what is done with one that was read."""


def _document(kind: type[Any], use: Callable[[Any], object]) -> Reader:
    return lambda data: use(files.loads(kind, data, "here"))


def _words(data: bytes) -> list[str]:
    return data.decode(errors="surrogateescape").split()


def _megatron(data: bytes) -> None:
    words = _words(data)
    # Files that flags name are another reader's.
    if not any(word.startswith(("--load", "--vocab-file", "--tokenizer-model", "--pretrained")) for word in words):
        read_job(words, world_size=8, megatron_version="0.16.1", device_kind="cuda", for_planning=True)


def _checkpoint(data: bytes) -> None:
    """The arguments in a checkpoint, as a pickle in a zip archive; half the inputs are the archive."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "iter_0000010")
        folder.mkdir()
        (folder / "metadata.json").touch()
        if data[:1] == b"Z":
            (folder / "common.pt").write_bytes(data[1:])
        else:
            with zipfile.ZipFile(folder / "common.pt", "w") as archive:
                archive.writestr("common/data.pkl", data)
        words = [*SMALL, "--load", name, "--ckpt-step", "10", "--use-checkpoint-args"]
        read_job(
            [*words, "--use-mp-args-from-checkpoint-args", "--use-distributed-optimizer"],
            world_size=8,
            megatron_version="0.16.1",
            device_kind="cuda",
            for_planning=True,
        )


def _tokenizer(data: bytes) -> None:
    """A tokenizer's file, read as each kind that is counted."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        for kind in ("HuggingFaceTokenizer", "Llama2Tokenizer", "GPT2BPETokenizer"):
            words = ["--tokenizer-type", kind, "--tokenizer-model", file.name, "--vocab-file", file.name]
            with contextlib.suppress(MegatronError):
                read_vocabulary(Arguments.parse(words, "0.16.1"))


def _log(data: bytes) -> None:
    text = data.decode(errors="replace")
    tracker = OutcomeTracker("0123456789abcdef", CHOICE)
    for line in text.splitlines():
        memory, iteration = parse_memory(line), parse_iteration(line)
        if memory:
            tracker.add_memory(memory)
        if iteration:
            tracker.add(iteration)
    for failure in filter(None, (explain_failure(text), failure_of(exception_in(text)))):
        why_no_plan_helps(failure, before=(failure,), written=("--seed", "x"), given=None)


def _machines(data: bytes) -> None:
    """--nodes, --nproc-per-node, --world-size, --gpu and --fabric, a word each."""
    words = [*_words(data), "", "", "", "", ""]
    sizes = [int(word) if word.isascii() and word.isdigit() and len(word) < 4000 else None for word in words[:3]]
    hosts, devices, ranks = sizes
    gpu, fabric = (None if "/" in word else word or None for word in words[3:5])
    # Matrices of as many hosts as are allowed take gigabytes.
    with mock.patch("pipette_launch.planning.machines.MOST_HOSTS", 128):
        machines_of(nodes=hosts, gpus_per_node=devices, world_size=ranks, gpu=gpu, fabric=fabric)


def _rendezvous(data: bytes) -> None:
    """--rdzv-endpoint and --rdzv-conf, a word each; no name is looked up."""
    endpoint, conf, *_ = [*_words(data), "", ""]
    flags = Namespace(
        rdzv_backend="c10d", rdzv_endpoint=endpoint, rdzv_conf=conf, standalone=False, nnodes="2", node_rank=0,
        master_addr="127.0.0.1", master_port=None, rdzv_id="none",
    )  # fmt: skip
    check_meeting(flags)
    with mock.patch("socket.getaddrinfo", side_effect=_nowhere):
        settings_of(flags).own_address()


def _nowhere(host: str, *_: object, **__: object) -> None:
    """What the resolver says of a name that it does not know, or that no host can have."""
    host.encode("idna")
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def _slurm(data: bytes) -> None:
    pattern, address, host, *_ = [*_words(data), "", "", ""]
    switches({"SLURM_TOPOLOGY_ADDR_PATTERN": pattern, "SLURM_TOPOLOGY_ADDR": address}, host)


ITERATION = (
    b"[2026-11-23 10:00:00] iteration %8d/ 500 | elapsed time per iteration (ms): 123.4 | lm loss: 1.0E+00 | grad\n"
)
LOG = b"".join(ITERATION % number for number in range(1, 40)) + (
    b"[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.5 | max allocated: 2.5 | reserved: 3.5 "
    b"| max reserved: 4.5\n[rank1]: torch.OutOfMemoryError: CUDA out of memory\n"
    b"x.py: error: unrecognized arguments: --typo 3\nx.py: error: argument --seed/-s: invalid int value\n"
)
PROFILE = json.dumps(
    {
        "distributedInfo": {"rank": 0, "world_size": 2},
        "traceEvents": [
            {
                "ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": 10.0 * at, "dur": 5.0,
                "args": {"correlation": at // 2},
            }
            for at, (category, name) in enumerate(
                (
                    ("python_function", "megatron/core/pipeline_parallel/schedules.py(311): forward_step"),
                    ("python_function", "megatron/core/pipeline_parallel/schedules.py(446): backward_step"),
                    ("cuda_runtime", "cudaLaunchKernel"),
                    ("kernel", "gemm"),
                )
            )
        ],
    }
).encode()  # fmt: skip
SAVED = pickle.dumps(
    {
        "args": {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "expert_model_parallel_size": 1,
            "use_distributed_optimizer": True,
            "pipeline_model_parallel_layout": None,
        },
        "kind": "dp_reshardable",
    },
    protocol=2,
)


def _zipped(data: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("common/data.pkl", data)
    return stream.getvalue()


READERS: dict[str, Reader] = {
    **{name: _document(type(made), use) for name, (made, use) in DOCUMENTS.items()},
    "megatron": _megatron,
    "checkpoint": _checkpoint,
    "tokenizer": _tokenizer,
    "log": _log,
    "machines": _machines,
    "rendezvous": _rendezvous,
    "slurm": _slurm,
    "unpack": lambda data: files.unpack(data.decode(errors="surrogateescape"), "here"),
}
SEEDS: dict[str, tuple[bytes, ...]] = {
    **{name: (files.dumps(made).encode(),) for name, (made, _) in DOCUMENTS.items()},
    "megatron": (" ".join(SMALL).encode(), b"--num-layers-per-virtual-pipeline-stage 2 " + " ".join(SMALL).encode()),
    "checkpoint": (SAVED, b"Z" + _zipped(SAVED)),
    "tokenizer": (b'{"model": {"vocab": {"a": 1}}, "added_tokens": [{"content": "b"}]}', b"\n\x05hello\n\x02hi"),
    "log": (LOG,),
    "profile": (PROFILE,),
    "machines": (b"4 8 32 h100-sxm fat-tree-2:1", b"2 2 4 gb200-nvl72 uniform"),
    "rendezvous": (b"host:29400 is_host=1,timeout=60", b"127.0.0.1 join_timeout=1"),
    "slurm": (b"switch.switch.node spine.leaf3.node17 node17",),
    "unpack": (files.pack(b"a text").encode(), base64.b64encode(b"no zlib")),
}
FOUND = HERE / "corpus"
"""What the fuzzers have found, a folder for each reader."""


def read(name: str, data: bytes) -> None:
    """Let a reader have its input; raises whatever is none of the project's own errors."""
    try:
        READERS[name](data)
    except PipetteError:
        return
