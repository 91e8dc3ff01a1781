"""`pipette watch`: from a command line to its output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch.test_metrics import kept, printed

from pipette_launch.cli import jobs
from pipette_launch.cli.pipette import main


def watched(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as caught:
        main(["watch", *words])
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


def test_once_prints_a_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The screen shows the newest job in the usual cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept(tmp_path / "pipette-launch")
    code, out, err = watched(capsys, "--once")

    assert (0, "") == (code, err)
    assert "training for " in out


@pytest.mark.parametrize("failed", [False, True])
def test_lines_end_with_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, failed: bool
) -> None:
    """There is one line for each change; the exit code shows how the job ended."""
    metrics = kept(tmp_path)
    steps = [
        lambda: None,
        lambda: metrics.iterated(printed(1, 0.5)),
        metrics.refresh,
        lambda: metrics.ended(failed=failed),
    ]
    monkeypatch.setattr(jobs.time, "sleep", lambda _: steps.pop(0)())
    code, out, _ = watched(capsys, str(tmp_path))
    lines = [line.split(" ", 1)[1] for line in out.splitlines()]

    assert int(failed) == code
    assert [line.split(",")[0] for line in lines] == ["training", "training", "failed" if failed else "succeeded"]
    assert "iteration 1 of 100" in lines[1]


def test_json_is_a_document_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its names have units."""
    kept(tmp_path).ended(failed=False)
    code, out, _ = watched(capsys, str(tmp_path), "--json")
    found = json.loads(out)

    assert 1 == out.count("\n")
    assert (0, "live-job", "succeeded", 1.0) == (code, found["kind"], found["phase"], found["predicted_step_s"])


def test_an_interrupt_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C exits with 0 and no traceback."""

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    kept(tmp_path)
    monkeypatch.setattr(jobs.time, "sleep", interrupt)

    assert (0, "") == watched(capsys, str(tmp_path))[::2]


def test_what_cannot_be_watched_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 2."""
    code, _, err = watched(capsys, str(tmp_path))
    assert (2, True) == (code, err.startswith("pipette watch: error: "))
