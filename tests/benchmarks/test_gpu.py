"""The GPU check keeps what it finds, ends in time, and its sums are right; it runs whole in tests/end_to_end."""

import json
import sys
import time
from pathlib import Path

import psutil
import pytest
from gpu_rules.nvml import FakeNvml, install

from benchmarks.gpu import (
    engine,
    jobs,
    launches,
    main_job,
    own_script,
    ranks,
    report,
    supervise,
    tight,
)
from benchmarks.gpu.jobs import COMMON_WORDS, ENGINE_WORDS, WITHOUT_KERNELS
from benchmarks.gpu.launches import Launch, losses_apart
from benchmarks.gpu.nodes import ByHand
from benchmarks.gpu.notebook import RUNNING, WHOLE, Notebook, device_here
from benchmarks.gpu.supervise import PARTS
from pipette_launch import megatron
from pipette_launch.errors import FileFormatError, PipetteError
from pipette_launch.facts import Device, Layout
from pipette_launch.probe.health import nvml
from pipette_launch.text import GIB

GPU = Device(
    kind="cuda", uuid="GPU-aaaa-0", name="NVIDIA H100", memory_total_bytes=80 * GIB, memory_free_bytes=79 * GIB
)
BESIDE = {
    "losses": ["2.000", "1.000"],
    "torchrun_losses": ["2.000", "1.000"],
    "steps_s": [0.2, 0.2],
    "torchrun_steps_s": [0.3, 0.3],
    "seconds": 9.0,
}
"""Losses and steps of a plan by hand beside torchrun's."""


def notebook(folder: Path, part: str = "ranks", left_s: float = 60.0, device: Device | None = None) -> Notebook:
    """A part's, on a CPU unless told otherwise."""
    ends_at_s = time.time() + left_s
    return Notebook(path=folder / f"{part}.json", part=part, device=device or device_here("cpu"), ends_at_s=ends_at_s)


def test_every_record_is_on_disk_at_once(tmp_path: Path) -> None:
    """A part that is killed leaves what it had found, and says that it was still running."""
    book = notebook(tmp_path)
    book.add("rank", case=1)
    cut = json.loads(book.path.read_text())
    book.close()

    assert (RUNNING, [{"kind": "rank", "case": 1}]) == (cut["ended"], cut["records"])
    assert WHOLE == json.loads(book.path.read_text())["ended"]


def test_what_fails_and_what_has_no_time_is_said_and_the_rest_goes_on(tmp_path: Path) -> None:
    """A failure keeps its first line; work that needs longer than is left is not begun."""

    def fail() -> None:
        raise PipetteError("no such luck\nat all")

    book = notebook(tmp_path, device=GPU)
    done = [book.attempt("a", fail), book.attempt("b", lambda: None, needs_s=1e6), book.attempt("c", lambda: None)]

    assert [False, False, True] == done
    assert {"what": "a", "why": "PipetteError: no such luck"} == book.missing[0]
    assert "b" == book.missing[1]["what"]
    assert book.missing[1]["why"].startswith("it needs 1000000 s and ")


def test_a_short_time_leaves_nothing_out_on_a_cpu(tmp_path: Path) -> None:
    """On a machine slower than any that we know, every piece still runs; only a part that hangs is ended."""
    book = notebook(tmp_path, left_s=-1.0)

    assert book.attempt("slow", lambda: None, needs_s=1e6)
    assert [] == book.missing


def test_a_wrong_result_fails_the_part(tmp_path: Path) -> None:
    """The part goes on and ends with the name of the wrong result, which the report lists."""
    book = notebook(tmp_path, "ranks")
    book.fail("losses", "they are 1.0e-02 apart")
    assert book.attempt("next", lambda: None)
    book.close()
    report.note_end(book.path, "it ended with exit code 1")

    text = report.whole_text(tmp_path)

    assert "failed: losses" == json.loads(book.path.read_text())["ended"]
    assert "This part is not whole: failed: losses.\n" in text
    assert "Failed:\n\n- losses: they are 1.0e-02 apart\n" in text


def test_parts_share_the_time_that_is_left() -> None:
    """The first gets its share of all; the last gets whatever the others left."""
    assert pytest.approx(1.0) == sum(part.share for part in PARTS)
    assert pytest.approx(100 * PARTS[0].share) == supervise.limits_s(PARTS, 100.0)
    assert pytest.approx(30.0) == supervise.limits_s(PARTS[-1:], 30.0)


def test_a_part_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its children too, those in a session of their own included; and the reason is told."""
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'], "
    code += "start_new_session=True); time.sleep(99)"
    real = supervise.subprocess.Popen
    monkeypatch.setattr(supervise.subprocess, "Popen", lambda _, **kw: real([sys.executable, "-c", code], **kw))
    before_s = time.monotonic()

    trouble = supervise.run(PARTS[0], [], limit_s=1.5, log=tmp_path / "log", device_kind="cpu")

    assert "it was ended after 2 s" == trouble
    assert time.monotonic() - before_s < 1.5 + 2 * supervise.GRACE_S
    assert [] == [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]


def test_a_report_tells_what_ran_what_did_not_and_why(tmp_path: Path) -> None:
    """Device, parts, records as sentences and tables, and what was not done; a folder without records is refused."""
    with pytest.raises(FileFormatError, match="no records of a check"):
        report.whole_text(tmp_path)
    book = notebook(tmp_path, "tests")
    book.add("test", name="x", outcome="passed", why="", seconds=1.0)
    book.miss("copies", "there was no time")
    report.note_end(book.path, "it was ended after 9 s")

    text = report.whole_text(tmp_path)

    assert "**This has not run on a GPU.**" in text
    assert "| tests | tests marked `gpu` | 1 | 1 | 0 | it was ended after 9 s |" in text
    assert "- 1 tests: 1 passed, 0 failed, 0 skipped." in text
    assert "- copies: there was no time" in text
    assert f"gpu_cpu_{time.strftime('%Y-%m-%d', time.gmtime())}.md" == report.results_file(tmp_path).name


def test_records_that_cannot_be_shown_cost_no_other_part(tmp_path: Path) -> None:
    """What a device nobody knew gives may break a sentence; the report says so and goes on."""
    book = notebook(tmp_path, "ranks")
    book.add("by hand", ranks="many")
    notebook(tmp_path, "tests").add("test", name="x", outcome="failure", why="so", seconds=1.0)

    text = report.whole_text(tmp_path)

    assert "- These records cannot be shown (" in text
    assert "- 1 tests: 0 passed, 1 failed, 0 skipped.\n- x: so" in text


def test_losses_are_compared_digit_by_digit() -> None:
    """One in three differs by a thousandth; runs of other flags are set beside the user's own."""

    def run(name: str, *losses: str) -> dict[str, object]:
        return {
            "kind": "run",
            "name": name,
            "seconds": 9.0,
            "first_iteration_s": 3.0,
            "steps_s": [0.5, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2],
            "losses": list(losses),
            "most_bytes": 0,
        }

    records = [
        run("cold", "1.0", "2.0", "4.004"),
        run("torchrun, the plan's flags", "1.0", "2.0", "4.000"),
        run("torchrun, own flags", "1.0", "2.0", "4.000"),
    ]
    said = "\n".join(main_job.lines(records))

    assert "| cold | 9.0 | 3.0 | 200 ms | 2 of 3 to the digit, at most 1.0e-03 apart | - |" in said
    assert "| torchrun, the plan's flags | 9.0 | 3.0 | 200 ms | 3 of 3 to the digit | - |" in said
    assert "The plan's step is 1.00 times as fast" in said


@pytest.mark.parametrize(("cases", "fails"), [(1, True), (2, False), (4, False)])
def test_a_warm_up_that_times_less_than_half_fails_the_part(tmp_path: Path, cases: int, fails: bool) -> None:
    """One of four wanted cases is too few, and two are enough; the report shows both numbers."""
    book = notebook(tmp_path, "main", device=GPU)
    book.add("warm-up", cases=cases, wanted=4, stages=3, phase_s={"compute": 18.0}, notes=[])

    main_job.check_cases(book)

    assert fails == bool(book.failed)
    said = f"Warm-up: {cases} of 4 compute cases timed, 3 stages run; seconds by phase: compute 18.0."
    assert said in list(main_job.lines(book.records))


def test_one_run_under_torchrun_shows_a_plan_of_the_users_own_layout() -> None:
    """It stands for a run with the user's own flags, which are the same."""
    run = {"kind": "run", "seconds": 9.0, "first_iteration_s": 3.0, "most_bytes": 0, "losses": ["1.0"]}
    plan = {"kind": "plan", "chosen": "tp1", "own": "tp1", "candidates": []}
    runs = [{**run, "name": name, "steps_s": [0.1]} for name in ("cold", main_job.PLANNED, "trials")]

    said = "\n".join(main_job.lines([plan, *runs]))

    assert "| trials | 9.0 | 3.0 | 100 ms | 1 of 1 to the digit | - |" in said
    assert "The plan's step is 1.00 times as fast" in said


def test_without_transformer_engine_its_part_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No launch is tried, and the report lists the job as not done."""
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda _: None)
    book = notebook(tmp_path, "engine", device=GPU)

    engine.measure(book)

    assert [{"kind": "engine", "is_installed": False}] == book.records
    assert [{"what": "the main job with Transformer Engine", "why": "it is not installed"}] == book.missing


def test_jobs_of_the_engine_are_read_as_such() -> None:
    """On a GPU the words choose Transformer Engine and bf16; on a CPU all jobs are in fp32."""
    words = [*main_job.MODELS["cuda"].split(), *COMMON_WORDS["cuda"], *ENGINE_WORDS, "--train-iters", "24"]
    job = megatron.read_job(words, world_size=1, megatron_version="0.16.1", device_kind="cuda")

    assert ("transformer_engine", "bf16") == (job.model.transformer_impl, job.model.params_dtype)
    assert "--bf16" not in COMMON_WORDS["cpu"]


@pytest.mark.parametrize(
    ("has_te", "has_apex", "flags"),
    [
        (False, True, WITHOUT_KERNELS),
        (True, False, ("--no-gradient-accumulation-fusion",)),
        (True, True, ()),
    ],
)
def test_kernels_that_are_not_installed_are_switched_off(
    monkeypatch: pytest.MonkeyPatch, has_te: bool, has_apex: bool, flags: tuple[str, ...]
) -> None:
    """Megatron's output layer needs Apex for fused gradients, also beside Transformer Engine."""
    monkeypatch.setattr(jobs.importlib.util, "find_spec", lambda _: has_apex or None)

    assert flags == jobs.kernel_flags(has_te=has_te)


def test_losses_are_apart_by_their_largest_relative_difference() -> None:
    """Lists of other lengths, missing losses and losses that are no numbers are infinitely far apart."""
    assert 0.0 == losses_apart(["2.0", "1.0"], ["2.0", "1.00"])
    assert pytest.approx(0.25) == losses_apart(["2.0", "1.25"], ["2.0", "1.0"])
    assert [float("inf")] * 3 == [
        losses_apart(["1.0"], []),
        losses_apart([""], ["1.0"]),
        losses_apart(["nan"], ["1.0"]),
    ]


def test_a_rank_that_does_not_answer_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ring is not done, and its collectives are not taken for right."""
    done = launches.Run(code=0, out="", err="gone", seconds=9.0, first_iteration_s=None, most_bytes=0)
    monkeypatch.setattr(ranks.Nodes, "run", lambda *_, **__: [done])
    book = notebook(tmp_path, "ranks", device=GPU)

    assert not ranks.meets(ranks.Nodes(book=book, folder=tmp_path), 2)
    assert "PipetteError: 0 of 2 ranks answered: gone" == book.missing[0]["why"]
    assert [] == book.records


def test_zero_bubble_schedules_run_by_hand_on_two_and_four_ranks() -> None:
    """Plans hold the order of each pipeline rank, for eight micro-batches; the toy size has one too."""
    on_gpu = {(one.schedule, one.layout.world_size) for one in ranks.BY_HAND["cuda"]}
    made = [one.plan("cuda", 8).chosen.order for one in ranks.BY_HAND["cuda"]]

    assert {("zb-1p", 2), ("zb-1p", 4)} < on_gpu
    assert {"zb-1p", "1f1b"} == {one.schedule for one in ranks.BY_HAND["cpu"]}
    assert ["zb-1p", None, "zb-1p"] == [one and one.name for one in made]
    assert {8} == {one.num_microbatches for one in made if one}


@pytest.mark.parametrize(("loss", "fails"), [("1.000", False), ("1.0009", False), ("1.002", True)])
def test_losses_under_a_schedule_are_those_of_megatrons_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, fails: bool
) -> None:
    """Within a thousandth; beyond that the part fails."""
    monkeypatch.setattr(ranks.Nodes, "run_by_hand", lambda *_: [])
    monkeypatch.setattr(ranks.Nodes, "beside_torchrun", lambda *_: {**BESIDE, "torchrun_losses": ["2.000", loss]})
    book = notebook(tmp_path, "ranks", device=GPU)
    what = ByHand(layout=Layout(pp=2), placement=(0, 1), schedule="zb-1p")

    ranks.by_hand(ranks.Nodes(book=book, folder=tmp_path), what)

    assert ([what.words] if fails else []) == [one["what"] for one in book.failed]


def test_a_schedule_by_hand_is_one_sentence() -> None:
    """It names ranks, layout, schedule, placement, equal losses, seconds and both steps."""
    record = {"kind": "by hand", "ranks": 2, "backend": "nccl", "chosen": "tp1 pp2 dp1 mbs1", "schedule": "zb-1p"}
    record |= {"placement": [0, 1], **BESIDE}

    assert (
        "2 ranks by nccl, tp1 pp2 dp1 mbs1, schedule zb-1p, placement [0, 1]: 2 of 2 losses are torchrun's to the "
        "digit; 9.0 s in all, a step 200 ms, under torchrun 300 ms."
    ) in list(ranks.lines([record]))


def test_a_watched_launch_asks_the_driver_once_a_second_in_one_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of its bytes are kept; three looks at a launcher of 2.5 s are all, and the session is closed."""
    fake = install(monkeypatch, FakeNvml(1))
    told = iter([2 * GIB, 3 * GIB, 5 * GIB, 4 * GIB])
    asked: list[int] = []

    def memory(_library: object, _handle: int) -> nvml.Memory:
        asked.append(fake.open)
        return nvml.Memory(total_bytes=80 * GIB, free_bytes=80 * GIB - next(told), held_bytes=0)

    monkeypatch.setattr(nvml, "memory", memory)
    started = launches.subprocess.Popen
    monkeypatch.setattr(
        launches.subprocess,
        "Popen",
        lambda _, **kw: started([sys.executable, "-c", "import time; time.sleep(2.5)"], **kw),
    )

    done = Launch(words=[], folder=tmp_path, device=GPU).finish(30.0)

    assert (0, 3 * GIB) == (done.code, done.most_bytes)
    assert 3 <= len(asked) <= 4
    assert {1} == set(asked)
    assert 0 == fake.open


def test_tests_marked_gpu_all_lie_in_one_folder() -> None:
    """The part `tests` collects that folder alone: to collect all tests takes ten seconds of processor time."""
    root = Path(__file__).parents[1]
    marked = {path for path in root.rglob("test_*.py") if "pytest.mark" + ".gpu" in path.read_text(encoding="utf-8")}

    assert marked
    assert {root / "gpu"} == {path.parent for path in marked}


def test_tight_memory_is_real(tmp_path: Path) -> None:
    """Once all but 64 MiB are gone, 256 MiB cannot be had, in the C library's own words, and 16 can."""
    code = f"import sys; sys.path.insert(0, {str(Path(tight.__file__).parents[2])!r})\n"
    code += "import torch; from benchmarks.gpu.tight import tighten\ntighten(64 << 20)\n"
    code += "torch.ones(16 << 20, dtype=torch.uint8)\n"
    code += "try: torch.ones(256 << 20, dtype=torch.uint8)\nexcept RuntimeError as error: print(error)\n"
    found = supervise.subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "can't allocate memory" in found.stdout


def test_a_case_that_cannot_run_here_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags that the script lacks, no GPU, no Transformer Engine, an old GPU; and none where the case can run."""
    plain, windows, fp8, *_ = own_script.CASES
    monkeypatch.setattr(own_script.torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(own_script.importlib.util, "find_spec", lambda name: name)
    megatron_lm = Path("megatron-lm/pretrain_gpt.py")

    assert "" == own_script.why_not(plain, "cpu", own_script.TRAINER)
    assert "the example trainer has no --window-size" in own_script.why_not(windows, "cuda", own_script.TRAINER)
    assert "it needs a GPU" == own_script.why_not(windows, "cpu", megatron_lm)
    assert "" == own_script.why_not(windows, "cuda", megatron_lm)
    assert "it needs compute capability 8.9" == own_script.why_not(fp8, "cuda", megatron_lm)
    monkeypatch.setattr(own_script.importlib.util, "find_spec", lambda _: None)
    assert "it needs Transformer Engine, which is not installed" == own_script.why_not(fp8, "cuda", megatron_lm)


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, []),
        ({"said_s": 1.3}, ["FP8: seconds of a step"]),
        ({"said_bytes": 90}, ["FP8: peak of torch's allocator"]),
        ({"measured_bytes": 0}, []),
        ({"notes": ["compute: layers were timed without CUDA graphs, because no"]}, ["FP8: the script's own graphs"]),
    ],
)
def test_a_played_case_is_judged_by_its_training(tmp_path: Path, changes: dict[str, object], failed: list[str]) -> None:
    """On a GPU times may be 25 % and peaks 5 % apart, and the layers must have the script's graphs."""
    book = notebook(tmp_path, "script", device=GPU)
    case = {"name": "FP8", "said_s": 1.1, "measured_s": 1.0, "said_bytes": 99, "measured_bytes": 100, "notes": []}

    own_script.judge(book, {**case, **changes})

    assert failed == [one["what"] for one in book.failed]
