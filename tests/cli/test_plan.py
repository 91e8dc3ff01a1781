"""`pipette plan` and `pipette report`: from a command line to screens, files and errors."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from facts_for_tests import tiny_cluster, tiny_measurements
from megatron_lines import TEXT
from search.worlds import on_gpus

from pipette_launch import megatron
from pipette_launch.cli.pipette import main, parser
from pipette_launch.errors import UsageError
from pipette_launch.facts import Plan, files
from pipette_launch.facts.measurements import StageReading, memory_digest
from pipette_launch.launch.cache import named_plan
from pipette_launch.report.page import page
from pipette_launch.report.plan import plan_file_screen
from pipette_launch.report.screen import changed_flags
from pipette_launch.text import seconds_text

EXAMPLES = os.path.relpath(Path(__file__).parents[2] / "examples")
"""Relative: commands are split at spaces, which the path of a clone may have."""
FREE = "--budget 60 --fix tp,pp,cp,vpp,order,overlap,recompute,dist_opt"
FEW = "--budget 0.5 --fix cp,mbs,vpp,order,overlap,recompute"
JOB = f"--megatron-version 0.16.1 pretrain_gpt.py {TEXT}"
WITHOUT_TORCH = """
import sys
from pipette_launch.cli.pipette import main
try:
    main(sys.argv[1:])
finally:
    assert not {"torch", "megatron"} & set(sys.modules), "heavy imports"
"""
LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 "
    "--transformer-impl transformer_engine --bf16 --position-embedding-type rope"
)


def answer(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int | str | None, str, str]:
    """Return exit code, stdout and stderr of `pipette WORDS`."""
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Write a plan file; return it with its screen."""
    path = tmp_path_factory.mktemp("plans") / "of" / "today" / "a.plan.json"
    words = f"plan -v --gpu h100-sxm --nodes 2 --nproc-per-node 4 --out {path} {FREE} {JOB}".split()
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            WITHOUT_TORCH,
            *words,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (0, "") == (ran.returncode, ran.stderr)
    return path, ran.stdout


def test_a_plan_is_made_on_a_laptop(saved: tuple[Path, str]) -> None:
    """The screen has job, choice, reasons, memory, flags, notes and the file's path; torch is not needed."""
    screen = saved[1]

    for heading in ("Job", "Machines", "Chosen", "Ranked", "Why", "Memory", "Flags", "Notes", "Plan file"):
        assert f"\n{heading:<9}" in screen
    for words in (
        "8 ranks on 2 hosts x 4 H100-SXM",
        "between hosts: network 47 GB/s",
        "tokens/s",
        "Nothing was measured",
    ):
        assert words in " ".join(screen.split())
    assert max(map(len, screen.splitlines())) <= 80


def test_the_file_holds_what_the_screen_showed(saved: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    """`pipette report` prints the same screen from the file."""
    path, screen = saved
    code, out, err = answer(f"report {path}", capsys)
    plan = files.read(path, Plan)

    assert (0, "") == (code, err)
    assert screen.split("\n", 1)[1] == out.split("\n", 1)[1]
    assert plan == files.loads(Plan, files.dumps(plan), "again")
    assert "imagined" == plan.provenance.source


def test_the_report_lies_beside_the_file(saved: tuple[Path, str]) -> None:
    """The screen names the report, which shows the file's step time and has the file's mode."""
    path, screen = saved
    report = path.with_suffix(".html")

    assert str(report) in screen.replace("\n           ", "")
    assert seconds_text(files.read(path, Plan).chosen.step_time_s) in report.read_text()
    assert path.stat().st_mode == report.stat().st_mode


def test_a_report_that_cannot_be_written_costs_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If a folder has the report's name, the plan is written and one line gives the reason."""
    path = tmp_path / "a.json"
    path.with_suffix(".html").mkdir()
    words = f"plan --gpu h100-sxm --nodes 1 --nproc-per-node 4 --out {path} {FREE} {JOB}"
    code, out, err = answer(words, capsys)
    assert (0, f"no report beside {path}: ") == (code, err.partition("[")[0])
    assert "a.html" not in out
    assert path.exists()


def test_a_report_is_made_anew_from_a_file(
    saved: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without measurements beside the plan, one line lists the missing parts."""
    page = tmp_path / "new" / "page.html"
    code, out, err = answer(f"report {saved[0]} --html {page}", capsys)

    assert (0, "") == (code, out)
    assert "no cluster.json" in err
    assert seconds_text(files.read(saved[0], Plan).chosen.step_time_s) in page.read_text()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--html {folder}", "--html {folder}: cannot be written"),
        (
            "--cluster {folder}/cluster.json",
            "--cluster works only with the report and the trace; add --html FILE or --trace FILE",
        ),
        ("--html {folder}/a.html --cluster {folder}/none.json", "none.json"),
    ],
)
def test_a_report_that_cannot_be_made_is_refused(
    saved: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, complaint: str
) -> None:
    """The error names the flag and the file."""
    code, _, err = answer(f"report {saved[0]} {flags.format(folder=tmp_path)}", capsys)

    assert code != 0
    assert complaint.format(folder=tmp_path) in err


def test_what_a_warm_up_measured_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`pipette report` also shows a cluster.json."""
    path = tmp_path / "cluster.json"
    files.write(path, tiny_measurements(tiny_cluster(3, 2)))
    code, out, _ = answer(f"report {path}", capsys)

    assert 0 == code
    assert "between hosts: 100 MB/s on every link" in out
    assert "tp2 cp1 mbs4" in out


def test_the_flags_mean_the_plan(saved: tuple[Path, str]) -> None:
    """Reading the changed flags, or the pasted ones, gives the chosen layout."""
    plan = files.read(saved[0], Plan)
    assert plan.setting is not None
    added, deleted = changed_flags(plan.setting.arguments, plan.setting.new_arguments)

    for words in (plan.setting.new_arguments, (*plan.setting.arguments, *(word for flag in added for word in flag))):
        job = megatron.read_job(words, world_size=8, megatron_version="0.16.1", device_kind="cuda")
        assert plan.chosen.layout == job.own
    assert [] == deleted
    assert plan.chosen.layout != plan.own.layout


def test_a_flag_that_is_not_priced_has_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan notes each flag that changes the real step but not the predicted one."""
    flags = "--bf16 --use-distributed-optimizer --num-distributed-optimizer-instances 2"
    code, out, _ = answer(f"plan --gpu h100 --nodes 1 --fix all {JOB} {flags}", capsys)

    assert 0 == code
    assert "--num-distributed-optimizer-instances 2 is in the predicted memory, but not in the step time" in " ".join(
        out.split()
    )


def test_hybrid_models_are_planned_on_imagined_machines(capsys: pytest.CaptureFixture[str]) -> None:
    """Stages are balanced by time within the pattern of layers."""
    flags = "--hybrid-layer-pattern MMMMMMM-MMMMMM*- --mamba-head-dim 8 --bf16 --transformer-impl transformer_engine"
    words = f"pretrain_mamba.py {TEXT} {flags} --pipeline-model-parallel-size 2"
    code, out, err = answer(
        f"plan --gpu h100 --nodes 1 --budget 5 --fix tp,pp,cp,mbs,recompute --megatron-version 0.17.1 {words}", capsys
    )

    assert (0, "") == (code, err)
    assert "pp2" in out.replace(" ", "") or "pp 2" in out


TOGETHER = "--bf16 --transformer-impl transformer_engine --padded-vocab-size 1024 --disable-bias-linear"
EXPERTS = "--num-experts 16 --expert-model-parallel-size 16 --moe-token-dispatcher-type flex --global-batch-size 64"


@pytest.mark.parametrize(
    ("machines", "flags", "note"),
    [
        (
            "h100 --nodes 2",
            "--tensor-model-parallel-size 4 --sequence-parallel --tp-comm-overlap --global-batch-size 64",
            "Each of the blocks of 4 tensor-parallel ranks lies inside a host, as --tp-comm-overlap requires.",
        ),
        (
            "h100 --nodes 2",
            f"{EXPERTS} --moe-enable-deepep",
            "Each of the blocks of 8 expert-parallel ranks lies inside a host, as DeepEP requires.",
        ),
        (
            "gb200-nvl72 --nodes 4",
            f"{EXPERTS} --moe-flex-dispatcher-backend hybridep",
            "Each of the blocks of 16 expert-parallel ranks lies inside an NVLink domain, as HybridEP requires.",
        ),
    ],
)
def test_what_lies_together_has_a_note(
    machines: str, flags: str, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan with userbuffers or the flex dispatcher notes the ranks that stay together."""
    code, out, err = answer(f"plan -v --gpu {machines} --fix all {JOB} {TOGETHER} {flags}", capsys)

    assert (0, "") == (code, err)
    assert note in " ".join(out.replace("\u2022", "").split())


def test_a_plan_for_imagined_hosts_runs_on_real_ones(saved: tuple[Path, str]) -> None:
    """The same number of real hosts replaces host0 and so on; another number is refused."""
    hosts = on_gpus(tiny_cluster(3, 4)).hosts
    taken = named_plan(saved[0], hosts[:2])

    assert ("node0", "node1") == taken.hosts
    assert "node0 to node1 replace them in torchrun's order" in taken.advice[-1]
    with pytest.raises(
        UsageError, match="the plan is for the hosts host0, host1; this job runs on node0, node1, node2"
    ):
        named_plan(saved[0], hosts)


def test_a_plan_goes_where_colleagues_can_read_it(saved: tuple[Path, str]) -> None:
    """A missing folder is created, and the file's mode follows the umask."""
    umask = os.umask(0)
    os.umask(umask)

    assert 0o666 & ~umask == saved[0].stat().st_mode & 0o777


def test_no_search_for_a_plan_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unwritable --out is refused before the search."""
    monkeypatch.setattr("pipette_launch.planning.plan.search_plan", lambda *_: pytest.fail("searched"))
    code, out, err = answer(f"plan --gpu h100 --nodes 1 --out /dev/null/x {FEW} {JOB}", capsys)

    assert (2, "") == (code, out)
    assert "--out /dev/null/x: cannot be written (File exists)" in err


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (
            "--global-batch-size 4",
            "The user's own layout tp1 pp1 dp8 mbs1 is ruled out: micro_batch_size*dp does not divide global_batch",
        ),
        (
            "--tensor-model-parallel-size 8 --num-attention-heads 4",
            "The user's own layout tp8 pp1 dp1 mbs1 is ruled out: tp does not divide num_attention_heads=4.",
        ),
        (
            "--pipeline-model-parallel-size 3",
            "--pipeline-model-parallel-size 3 needs a multiple of 3 ranks, but the job has 8; change them, or",
        ),
    ],
)
def test_who_asks_for_a_plan_needs_no_layout(words: str, note: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A rule that only the user's own layout breaks is a note, and the chosen layout is legal."""
    code, out, err = answer(f"plan --json --gpu h100 --nodes 1 --budget 0.5 --fix overlap {JOB} {words}", capsys)
    plan = files.loads(Plan, out, "stdout")
    setting = plan.setting

    assert (0, "") == (code, err)
    assert any(each.startswith(note) for each in plan.advice)
    assert not (plan.keeps_own and plan.own_fault)
    assert setting is not None
    chosen = megatron.read_job(setting.new_arguments, world_size=8, megatron_version="0.16.1", device_kind="cuda").own
    assert plan.chosen.layout == chosen


FLEX = "--num-experts 4 --moe-token-dispatcher-type flex --moe-enable-deepep --transformer-impl transformer_engine"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (f"--num-layers 5 --pipeline-model-parallel-size 4 {FLEX}", "--num-layers 5 does not divide over"),
        ("--num-layers 6 --pipeline-model-parallel-size 4 --tensor-model-parallel-size 2", "--num-layers 6 does not"),
        (f"--tensor-model-parallel-size 3 {FLEX}", "--tensor-model-parallel-size 3 needs a multiple of 3 ranks"),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|t*4L",
            "--pipeline-model-parallel-layout Et*3|t*4L: has 1 E, 7 t, 1 L; needs one E, one t for each of",
        ),
        (
            "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 8",
            "--num-layers 8 does not divide over --pipeline-model-parallel-size 2 with --decoder-first",
        ),
    ],
)
def test_what_stands_in_for_a_refused_layout_is_not_shown_as_yours(
    words: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan has the reason of the refusal, names the stand-in in a note, and no screen calls it yours."""
    code, out, _ = answer(f"plan --json --gpu h100-sxm --nodes 1 --budget 0.5 --fix overlap {JOB} {words}", capsys)
    plan = files.loads(Plan, out, "stdout")
    screens = [plan_file_screen(plan, title="pipette plan", saved_to=None), str(page.what_changes(plan))]
    screens += [str(page.alternatives(plan)), str(page.step_parts(plan))]

    assert 0 == code
    assert plan.own_fault.startswith(reason)
    assert f"{plan.own_fault}; {plan.own.layout.words()} replaces your own layout" in plan.advice
    assert not [note for note in plan.notes if "is ruled out" in note]
    assert not plan.keeps_own
    assert not [screen for screen in screens if "yours" in screen]


PREDICTS = "--mtp-num-layers 1 --position-embedding-type rope --pipeline-model-parallel-size"


@pytest.mark.parametrize(
    ("words", "chunks", "after"),
    [
        (f"{PREDICTS} 4 --pipeline-model-parallel-layout Et*3|(t|)*5,m|L", (3, 1, 1, 1, 1, 1, 0, 0), 1),
        (f"{PREDICTS} 4 --pipeline-model-parallel-layout E|t*4|t*4m|L", (0, 4, 4, 0), 1),
        (f"{PREDICTS} 2 --pipeline-model-parallel-layout Et*5|t*3mL", (5, 3), 0),
        (f"{PREDICTS} 2 --pipeline-model-parallel-layout Et*8m|L", (8, 0), 1),
        (f"{PREDICTS} 2 --decoder-first-pipeline-num-layers 5", (5, 3), 0),
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E|t*4|t*4|L", (0, 4, 4, 0), 0),
    ],
)
def test_your_own_stages_stay_as_you_wrote_them(
    words: str, chunks: tuple[int, ...], after: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fixed layout is priced and chosen, and no flag changes."""
    code, out, _ = answer(f"plan --json --gpu h100-sxm --nodes 1 --budget 0.5 --fix all {JOB} {words}", capsys)
    plan = files.loads(Plan, out, "stdout")

    assert (0, True, "") == (code, plan.keeps_own, plan.own_fault)
    assert (chunks, after) == (plan.own.layout.layers_per_chunk, plan.own.layout.chunks_after_mtp)
    assert plan.num_layouts == 1
    assert plan.setting is not None
    assert plan.setting.arguments == plan.setting.new_arguments


def test_equal_questions_get_equal_plans(capsys: pytest.CaptureFixture[str]) -> None:
    """The same command and seed give the same plan, except for times."""
    made = []
    for _ in range(2):
        code, out, err = answer(
            f"plan --json --gpu a100-80gb --world-size 4 --fix tp,cp,mbs,vpp,order,overlap --budget 60 {JOB}", capsys
        )
        assert (0, "") == (code, err)
        plan = files.loads(Plan, out, "stdout")
        made.append(replace(plan, solve_s=0.0, provenance=replace(plan.provenance, made_at="")))

    assert made[0] == made[1]


def test_a_busy_machine_cuts_no_search_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The budget is processor time: a wall clock that jumps by days does not end the search."""
    monkeypatch.setattr(time, "monotonic", itertools.count(0.0, 86400.0).__next__)
    code, out, err = answer(f"plan --gpu H100-SXM --nodes 1 {FREE} {JOB}", capsys)

    assert 0 == code, err
    assert "stopped at its budget" not in out


def test_a_measured_cluster_is_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file gives the sizes, other sizes are refused, and a mistyped flag is noted."""
    path = tmp_path / "cluster.json"
    files.write(path, tiny_measurements(tiny_cluster(2, 2)))
    code, out, err = answer(f"plan --cluster {path} {FEW} {JOB} --tensor-model-parallel-szie 2", capsys)
    refused = answer(f"plan --cluster {path} --nodes 8 {JOB}", capsys)
    latent = answer(f"plan --cluster {path} {JOB} {LATENT}", capsys)

    assert (0, "") == (code, err)
    assert "4 ranks on 2 hosts x 2 test cpu with 8.00 GiB, measured at 2026-11-21" in " ".join(out.split())
    assert "(did you mean --tensor-model-parallel-size?)" in " ".join(out.split())
    assert 2 == refused[0]
    assert (0, "") == latent[::2]
    assert "has 2 hosts x 2 devices = 4 ranks, but the job has 8 hosts; leave the sizes out, or name" in refused[2]


@pytest.mark.parametrize("machines", ["--gpu h100 --nodes 1", "--gpu v100-sxm2-16gb --nodes 1", "--cluster FILE"])
def test_a_prediction_and_a_plan_show_the_same_memory(
    machines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both print the same need and limit for one layout, in the same words."""
    words = f"{TEXT} --pipeline-model-parallel-size 2"
    job = megatron.read_job(words.split(), world_size=8, megatron_version="0.16.1", device_kind="cpu")
    ran = StageReading(
        job_digest=memory_digest(job),
        layout=job.own,
        pp_rank=1,
        slot=0,
        allocator_peak_bytes=5 << 30,
        reserved_peak_bytes=0,
        device_peak_bytes=0,
    )
    cluster = replace(tiny_measurements(tiny_cluster(2, 4)), stages=(ran,), overhead_bytes=1 << 30)
    files.write(tmp_path / "C", cluster)
    machines = machines.replace("FILE", str(tmp_path / "C"))
    asked = f"{machines} --megatron-version 0.16.1 pretrain_gpt.py {words}"
    screens = [answer(f"{command} {asked}", capsys)[1] for command in ("predict", "plan -v --fix all")]
    predicted, planned = (screen[screen.index("\nMemory  ") :].split("\n\n")[0] for screen in screens)

    assert predicted.startswith(f"{planned}\n")
    assert ("6.00 GiB of 7.36 GiB" in planned) == ("--cluster" in machines)


@pytest.mark.parametrize(
    ("variable", "value", "is_larger"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":65536:1", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", False),
        ("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8, expandable_segments:True", False),
    ],
)
def test_the_environments_memory_counts_in_plans_too(
    variable: str, value: str, is_larger: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Environment variables change the predicted memory of plans and predictions equally, with a note."""
    asked = f"--gpu h100 --nodes 1 --json --megatron-version 0.16.1 pretrain_gpt.py {TEXT}"

    def answers() -> tuple[list[int], list[bool]]:
        predicted, planned = (
            json.loads(answer(f"{one} {asked}", capsys)[1]) for one in ("predict", "plan -v --fix all")
        )
        peaks = [predicted["stages"][0]["peak_bytes"], planned["chosen"]["memory"]["need_bytes"][0]]
        return peaks, [any("with expandable segments" in note for note in one["notes"]) for one in (predicted, planned)]

    for name in ("CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    usual, unnamed = answers()
    monkeypatch.setenv(variable, value)
    changed, named = answers()

    assert usual[0] == usual[1]
    assert changed[0] == changed[1]
    assert is_larger == (changed[0] > usual[0])
    assert [False, False] == unnamed
    assert [not is_larger] * 2 == named


def test_variables_and_sizes_of_a_launch_line_count(capsys: pytest.CaptureFixture[str]) -> None:
    """A pasted line gives plans and predictions the nodes, processes and variables that the words state elsewhere."""
    buffers = "CUBLAS_WORKSPACE_CONFIG=:65536:1"
    line = f"torchrun --nnodes 1 --nproc_per_node 4 pretrain_gpt.py {TEXT}"
    given = "--gpu h100 --json --megatron-version 0.16.1"
    for command in ("predict", "plan --fix all"):
        bare, large = (json.loads(answer(f"{command} {given} {one}", capsys)[1]) for one in (line, f"{buffers} {line}"))
        same = json.loads(answer(f"{command} {given} --nodes 1 --gpus-per-node 4 {line.partition('4 ')[2]}", capsys)[1])
        part = "stages" if command == "predict" else "chosen"
        assert same[part] == bare[part]
        peaks = [
            each["stages"][0]["peak_bytes"] if command == "predict" else each["chosen"]["memory"]["need_bytes"][0]
            for each in (bare, large)
        ]
        assert peaks[0] < peaks[1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            f"plan --gpu gb200-nvl72 --nodes 2 --fabric {EXAMPLES}/gb200-nvl72.json {FEW},tp,pp {JOB}",
            "8 ranks on 2 hosts x 4 GB200-NVL72 with 184.31 GiB",
        ),
        (f"plan --gpu h100 --nodes 1 {FEW},tp {JOB} {LATENT}", "8 ranks on 1 host x 8 H100-SXM"),
        (f"plan --gpu {EXAMPLES}/mi300x.json --nodes 1 {FEW},tp {JOB}", "8 ranks on 1 host x 8 MI300X with 191.85"),
    ],
)
def test_answers(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Racks with four devices per host, a model without warm-up support, and a device file are planned."""
    code, out, err = answer(words, capsys)

    assert (0, "") == (code, err)
    assert expected in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (f"plan --gpu h100 {JOB}", 2, "--world-size is missing: give this number, or the number of hosts"),
        (f"plan --world-size 8 {JOB}", 2, "--gpu and --cluster are missing: name a device type or a measured cluster"),
        (
            f"plan --gpu hh200 --nodes 2 {JOB}",
            2,
            "unknown device 'hh200'; did you mean H200, GH200-96GB",
        ),
        (
            f"plan --gpu a100 --nodes 2 {JOB}",
            2,
            "did you mean A100-40GB, A100-80GB, A100-40GB-PCIe, A100-80GB-PCIe?",
        ),
        (
            f"plan --gpu h100 --nodes 2 --fabric fat-tre-2:1 {JOB}",
            2,
            "neither a file nor a known name; did you mean fat-",
        ),
        (f"plan --gpu h100 --nodes 2 --fabric no.json {JOB}", 2, "no.json: cannot be read"),
        (
            f"plan --gpu h100 --nodes 2 --fabric {EXAMPLES}/fat-tree.json {JOB}",
            2,
            "fat-tree.json: network_factor: host5 is not one of the job's hosts host0 to host1",
        ),
        (f"plan --cluster c.json --fabric uniform {JOB}", 2, "--fabric describes imagined machines"),
        (f"plan --gpu h100 --nodes 1 --fix colour {JOB}", 2, "--fix colour: no such part of a layout"),
        (f"plan --gpu h100 --nodes 1 --budget -1 {JOB}", 2, "--budget must be at least 0 seconds and finite, got -1"),
        (f"plan --gpu h100 --nodes 1 --margin 2 {JOB}", 2, "--margin must be at least 0 and below 1"),
        (f"plan --gpu h100 --nodes 1 --margin nan {JOB}", 2, "--margin must be at least 0 and below 1"),
        (f"plan --gpu h100 --nodes 1 --memory-margin nan {JOB}", 2, "--memory-margin must be at least 0"),
        (f"plan --gpu h100 --nodes 1 --budget inf {JOB}", 2, "--budget must be at least 0 seconds and finite, got inf"),
        (f"plan --gpu h100 --nodes 1 --budget abc {JOB}", 2, "argument --budget: invalid float value: 'abc'"),
        (f"plan --cluster nowhere.json {JOB}", 2, "nowhere.json: cannot be read (No such file or directory)"),
        (f"plan --gpu v100-sxm2-16gb --nodes 1 {JOB} --bf16", 2, "V100-SXM2-16GB has no known peak for bf16"),
        (f"plan --gpu h100 --nodes 1 --out /dev/null/x {FEW},tp,pp {JOB}", 2, "--out /dev/null/x: cannot be written"),
        (
            f"plan --gpu rtx-4090 --nodes 1 --fix all --budget 1 {JOB} --hidden-size 32768 --num-attention-heads 64",
            1,
            "no layout fits in memory: the leanest of",
        ),
        (
            f"plan --gpu h100 --nodes 1 --fix dp {JOB} --global-batch-size 4",
            1,
            "no layout is legal for 8 ranks with dp fixed; the user's own tp1 pp1 dp8 mbs1 breaks: micro_batch_size*dp",
        ),
        (
            f"plan --gpu h100 --nodes 1 --fix tp {JOB} --tensor-model-parallel-size 3",
            2,
            "--tensor-model-parallel-size 3 needs a multiple of 3 ranks, but the job has 8",
        ),
        ("report nowhere.json", 2, "nowhere.json: cannot be read"),
        (f"report {EXAMPLES}/fat-tree.json", 2, "expected a 'plan' document, found 'fabric'"),
    ],
)
def test_complaints(words: str, code: int, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr names the problem and a remedy; stdout is empty."""
    found, out, err = answer(words, capsys)

    assert (code, "") == (found, out)
    assert complaint.lower() in err.lower()
    assert err.splitlines()[-1].startswith(f"pipette {words.split(maxsplit=1)[0]}: error: ")


def test_the_flags_are_frozen() -> None:
    """A new flag is a reviewed line here."""
    commands = next(action for action in parser()._actions if action.dest == "command")
    flags = {flag for action in commands.choices["plan"]._actions for flag in action.option_strings if flag[:2] == "--"}

    assert {
        "--budget",
        "--cluster",
        "--csv",
        "--fabric",
        "--fix",
        "--gpu",
        "--gpus-per-node",
        "--help",
        "--hosts",
        "--json",
        "--margin",
        "--megatron-version",
        "--bridge-config",
        "--memory-margin",
        "--module",
        "--nnodes",
        "--nodes",
        "--nproc-per-node",
        "--nproc_per_node",
        "--out",
        "--quiet",
        "--schedules",
        "--seed",
        "--top",
        "--verbose",
        "--world-size",
    } == flags


def test_the_ranked_list_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """--top sets the rows of list, CSV and document; stdout has nothing else with --csv and --json."""
    words = f"--gpu h100-sxm --nodes 2 --nproc-per-node 4 --budget 60 --fix cp,vpp,order,recompute {JOB}"
    screen, table, document = (
        answer(f"plan {form} {words}", capsys)[1] for form in ("--top 3", "--top 3 --csv", "--json")
    )
    rows, plan = list(csv.DictReader(io.StringIO(table))), files.loads(Plan, document, "stdout")

    assert "Ranked" in screen
    assert [1, 2, 3] == [int(row["place"]) for row in rows if row["place"]]
    assert rows[0]["layout"] == plan.chosen.layout.words() == plan.ranked[0].layout.words()
    assert plan.setting is not None
    assert plan.setting.new_arguments == plan.ranked[0].new_arguments
    code, _, complaint = answer(f"plan --top 201 {words}", capsys)
    assert 2 == code
    assert "--top must be from 0 to 200, got 201" in complaint


def test_how_much_is_shown(saved: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    """A screen has 40 lines and only notes with advice; -q prints one line, also for a plan file."""
    words = f"--gpu h100-sxm --nodes 2 --nproc-per-node 4 {FREE} {JOB}"
    screen, line, of_file = (
        answer(one, capsys)[1] for one in (f"plan {words}", f"plan -q {words}", f"report -q {saved[0]}")
    )

    assert 40 >= screen.count("\n")
    assert "Nothing was measured" not in screen
    assert "notes on what was assumed; -v shows them, --out FILE keeps them" in " ".join(screen.split())
    assert line == of_file
    assert 1 == line.count("\n")
    assert "a step predicted" in line
