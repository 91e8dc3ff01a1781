"""Golden rows become the jobs that ran, each layout once, and whatever is left out is counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.validation import golden
from benchmarks.validation.cli import main
from benchmarks.validation.golden_jobs import command_line, nearest_release, read_layout, short_reason
from benchmarks.validation.golden_rows import COLUMNS, distinct_layouts, read_golden
from benchmarks.validation.golden_score import families_of
from benchmarks.validation.options import GOLDEN_ARGS, GOLDEN_ROWS
from benchmarks.validation.tables import DataError
from pipette_launch.facts import Layout
from pipette_launch.megatron.flags import flag_table

ARGS: dict[str, Any] = {
    "num-layers": 8,
    "hidden-size": 64,
    "num-attention-heads": 8,
    "seq-length": 32,
    "max-position-embeddings": 32,
    "micro-batch-size": 1,
    "global-batch-size": 32,
    "train-iters": 50,
    "tensor-model-parallel-size": 2,
    "bf16": True,
}
ROW = {
    "tag": "core_v0.16.1",
    "model": "gpt",
    "test_case": "one",
    "gpu": "A100",
    "nodes": "1",
    "gpus_per_node": "8",
    "mem_allocated_bytes_last": "100",
    "mem_max_allocated_bytes": "200",
    "iter_time_s_median": "",
    "args_key": "k",
    "env": "dev",
}


def files(
    folder: Path, rows: list[dict[str, str]], args: dict[str, dict[str, Any]], kind: str = "regular"
) -> golden.Files:
    """A golden file and its flags; each row is ROW with changes."""
    lines = [",".join(COLUMNS), *(",".join((ROW | row)[name] for name in COLUMNS) for row in rows)]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    records = [
        {"args_key": key, "args": ARGS | more, "env_vars": None, "test_type": kind} for key, more in args.items()
    ]
    (folder / "args.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return golden.Files(rows=folder / "rows.csv", args=folder / "args.jsonl")


def read(found: golden.Files) -> golden.Golden:
    """Scored by itself."""
    return golden.read(found, found)


def test_flags_become_the_command_line_that_ran() -> None:
    """True is a bare flag, false none; brackets and blanks give several words; a protected pipe is a pipe."""
    args = {
        "bf16": True,
        "swiglu": False,
        "recompute-modules": "[mlp moe_act]",
        "hierarchical-context-parallel-sizes": "2 2",
        "pipeline-model-parallel-layout": "Et*3\\\\|\\\\(tt\\\\|\\\\)*6tL",
        "lr": 0.1,
    }
    expected = (
        "--bf16 --recompute-modules mlp moe_act --hierarchical-context-parallel-sizes 2 2 "
        "--pipeline-model-parallel-layout Et*3|(tt|)*6tL --lr 0.1"
    )

    assert expected.split() == command_line(args, flag_table("0.16.1"))


def test_a_row_becomes_its_job(tmp_path: Path) -> None:
    """World size from the row, else one node of 8; GPT-2's vocabulary where no tokenizer is named."""
    data = read(files(tmp_path, [{"nodes": "2"}, {"nodes": "", "gpus_per_node": "", "gpu": "A100?"}], {"k": {}}))
    jobs = [item.job for item, _ in data.given]

    assert [Layout(tp=2, dp=8, etp=2), Layout(tp=2, dp=4, etp=2)] == [job.own for job in jobs if job]
    assert [50257, 50257] == [job.model.vocab_size for job in jobs if job]
    assert ["A100", "A100"] == [item.layout.newest.gpu for item, _ in data.given]


def test_a_layout_is_scored_once(tmp_path: Path) -> None:
    """Twins by renamed test, moved folder, later tag or other paths are one; the measured value is their median."""
    rows = [
        {},
        {"tag": "core_v0.15.0"},
        {"test_case": "renamed", "model": "moe", "args_key": "twin", "mem_max_allocated_bytes": "230"},
        {"test_case": "again", "mem_max_allocated_bytes": "210"},
        {"gpu": "H100"},
        {"args_key": "other"},
    ]
    twins = {"k": {}, "twin": {"data-path": "elsewhere", "lr": 1, "train-iters": 9}, "other": {"swiglu": True}}
    layouts = distinct_layouts(read_golden(*_paths(files(tmp_path, rows, twins))).rows)

    assert [("A100", 4, 3, 210.0), ("H100", 1, 1, 200.0), ("A100", 1, 1, 200.0)] == [
        (item.newest.gpu, len(item.rows), len(item.distinct), item.peak_bytes) for item in layouts
    ]


def test_a_row_has_the_torch_release_of_the_oldest_tag_with_its_values(tmp_path: Path) -> None:
    """Tests with fused cross-entropy whose first steps copy the logits differently are different layouts."""
    rows = [
        {"tag": "core_v0.16.1", "env": "dev_dgx_a100"},
        {"tag": "core_v0.11.0"},
        {"tag": "core_v0.15.0", "env": "lts_dgx_a100", "mem_max_allocated_bytes": "220"},
        {"tag": "core_v0.16.1", "mem_max_allocated_bytes": "230"},
    ]
    plain = distinct_layouts(read_golden(*_paths(files(tmp_path, rows, {"k": {}}))).rows)
    fused = distinct_layouts(
        read_golden(*_paths(files(tmp_path, rows, {"k": {"cross-entropy-loss-fusion": True}}))).rows
    )

    assert [[(2, 5), (2, 5), (2, 2), (2, 10)]] == [[row.torch for row in layout.rows] for layout in plain]
    assert [(1, 200.0), (2, 220.0), (0, 230.0)] == [(each.newest.logit_copies, each.peak_bytes) for each in fused]


def test_the_first_step_of_an_old_torch_is_the_peak_that_nvidia_measured() -> None:
    """NVIDIA measured one test on A100 with torch 2.2 and 2.5; one fp32 copy of the logits lies between both."""
    data = read(golden.Files(rows=GOLDEN_ROWS, args=GOLDEN_ARGS))
    given = tuple(item for item in data.given if item[0].layout.newest.logit_copies)
    ran = golden.run(replace(data, given=given), "closed form", golden.closed_form)

    assert [1, 2] == [item.layout.newest.logit_copies for item, _ in given]
    assert [] == [
        line.key for line in ran.lines if line.quantity == "peak" and line.errors and line.errors.largest > 0.015
    ]


def test_values_of_an_older_test_of_another_model_are_not_scored(tmp_path: Path) -> None:
    """To the last byte and second they cannot be measured twice; without seconds nobody knows."""
    rows = [
        {"iter_time_s_median": "0.17213", "tag": "core_v0.15.0"},
        {"iter_time_s_median": "0.17213", "model": "hybrid", "args_key": "other"},
        {"iter_time_s_median": "0.18", "model": "hybrid", "args_key": "third"},
    ]
    data = read(files(tmp_path, rows, {"k": {}, "other": {"swiglu": True}, "third": {"num-layers": 4}}))

    assert [("its values are those of another model's test", "line 3")] == [
        (reason, name.split(":")[0]) for reason, name in data.skipped
    ]


def test_families_hold_renamed_and_changed_tests(tmp_path: Path) -> None:
    """Linked by name, by flags that matter, or by the job that is read, over any number of steps."""
    rows = [
        {"args_key": "k"},
        {"args_key": "changed"},
        {"test_case": "renamed", "args_key": "changed"},
        {"test_case": "third", "args_key": "same job", "gpu": "H100"},
        {"test_case": "stranger", "args_key": "stranger"},
    ]
    args = {"k": {}, "changed": {"swiglu": True}, "same job": {"decoupled-lr": 1}, "stranger": {"num-layers": 4}}
    data = read(files(tmp_path, rows, args))

    assert [0, 0, 0, 3] == [number for _, number in data.given]


def test_development_data_share_families_with_a_given_file(tmp_path: Path) -> None:
    """A held-out row that repeats a development test never takes its constant from that test."""
    source = GOLDEN_ROWS.read_text(encoding="utf-8").splitlines()
    header = next(line for line in source if not line.startswith("#"))
    twin = next(line for line in source if "gpt3_mcore_te_tp2_pp2_cp2,dev_dgx_a100" in line)
    copy = tmp_path / "held_out.csv"
    copy.write_text("\n".join([header, twin.replace("gpt3_mcore_te_tp2_pp2_cp2,", "another_name,")]), encoding="utf-8")

    data = golden.read(golden.Files(rows=copy, args=GOLDEN_ARGS), golden.Files(rows=GOLDEN_ROWS, args=GOLDEN_ARGS))
    ((held_out, family),) = data.given

    assert "another_name" == held_out.layout.newest.test_case
    names = {row.test_case for item, number in data.fit if number == family for row in item.layout.rows}
    assert "gpt3_mcore_te_tp2_pp2_cp2" in names


def test_no_fold_of_the_development_data_shares_a_configuration() -> None:
    """Over all rows: equal test names, equal flags that matter and equal jobs are in one family."""
    given = read(golden.Files(rows=GOLDEN_ROWS, args=GOLDEN_ARGS)).given
    found: dict[object, set[int]] = {}
    for item, family in given:
        for row in item.layout.rows:
            found.setdefault(row.test_case, set()).add(family)
            found.setdefault(row.configuration.layout_words, set()).add(family)

    assert [] == [key for key, numbers in found.items() if len(numbers) > 1]
    assert len(set(families_of([item for item, _ in given]))) > 40


@pytest.mark.parametrize(
    ("row", "more", "kind", "reason"),
    [
        ({"model": "bert"}, {}, "regular", "not a decoder-only model"),
        ({"nodes": "", "gpus_per_node": ""}, {}, "release", "world size of a release test is not stated"),
        ({}, {"is-hybrid-model": True}, "regular", "needs --hybrid-override-pattern"),
        (
            {},
            {"tokenizer-type": "HuggingFaceTokenizer", "tokenizer-model": "/nowhere"},
            "regular",
            "the vocabulary cannot be counted on this machine",
        ),
    ],
)
def test_what_is_not_scored_has_a_reason(
    tmp_path: Path, row: dict[str, str], more: dict[str, Any], kind: str, reason: str
) -> None:
    """Short enough to count, and the row with it."""
    data = read(files(tmp_path, [row], {"k": more}, kind))

    assert [(reason, "line 2")] == [(why, name.split(":")[0]) for why, name in data.skipped]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("--fp8 e4m3: not modelled; remove it", "not modelled"),
        ("layers do not divide; change them", "layers do not divide"),
    ],
)
def test_reasons_are_short(message: str, reason: str) -> None:
    """Without the values of one row, so that equal ones are counted together."""
    assert reason == short_reason(ValueError(message))


def test_unknown_tags_and_flags_are_read_with_a_note(tmp_path: Path) -> None:
    """The nearest release reads them."""
    (layout,) = distinct_layouts(
        read_golden(*_paths(files(tmp_path, [{"tag": "core_v0.11.0"}], {"k": {"brand-new": 1}}))).rows
    )
    found = read_layout(layout)

    assert found.job is not None
    assert ("tag older than 0.16 read as 0.16", "flag not known to Megatron 0.16: --brand-new") == found.notes
    assert ("0.99.0", 1) == (nearest_release("core_v0.99.0")[0], len(nearest_release("core_v0.99.0")[1]))
    assert ("0.20", 1) == (nearest_release("dev")[0], len(nearest_release("dev")[1]))
    assert ("0.16.1", []) == nearest_release("core_v0.16.1")


def test_an_unknown_args_key_is_an_error(tmp_path: Path) -> None:
    """With file, line and column."""
    with pytest.raises(DataError, match=r"rows.csv, line 2, column args_key: 'missing' is not in .*args.jsonl"):
        read(files(tmp_path, [{"args_key": "missing"}], {"k": {}}))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"args_key": 1, "args": {}, "test_type": "r"}', "line 1, field args_key: 1 is no str"),
        ('{"args_key": "k", "test_type": "r"}', "line 1, field args: None is no dict"),
        ('{"args_key": "k", "args": {}, "test_type": "r", "env_vars": 3}', "line 1, field env_vars: 3 is no dict"),
    ],
)
def test_bad_flags_are_an_error(tmp_path: Path, line: str, message: str) -> None:
    """With file, line and field."""
    found = files(tmp_path, [{}], {"k": {}})
    found.args.write_text(line, encoding="utf-8")

    with pytest.raises(DataError, match=message):
        read(found)


def test_the_command_scores_a_file_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows, flags and nothing else; the table, the reasons and the JSON come out."""
    found = files(tmp_path, [{}, {"model": "bert"}], {"k": {}})

    code = main(
        [
            "--golden",
            str(found.rows),
            "--args",
            str(found.args),
            "--json",
            str(tmp_path / "out.json"),
            "--verbose",
        ]
    )

    printed = capsys.readouterr().out
    assert 0 == code
    assert "not scored: 1 x not a decoder-only model" in printed
    assert "line 3: core_v0.16.1 bert/one A100: bert: not a decoder-only model" in printed
    lines = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["lines"]
    assert {"all", "dense"} <= {line["group"] for line in lines}
    assert {1} == {line["scored"] for line in lines}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--golden", "x.csv"], 2, "--golden and --args belong together"),
        (["--golden", "nowhere.csv", "--args", str(GOLDEN_ARGS)], 1, "nowhere.csv: cannot be read"),
        (["--record", "--only", "golden"], 2, "--record takes the figures of all"),
        (["--vtrain-fraction", "1"], 2, "must be between 0 and 1"),
    ],
)
def test_bad_input_is_one_line(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, with an exit code; never a traceback."""
    assert code == main(words)
    assert message in capsys.readouterr().err


def _paths(found: golden.Files) -> tuple[Path, Path]:
    return found.rows, found.args
