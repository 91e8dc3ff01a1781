"""Tests of the benchmark of the README's first run."""

from benchmarks.bench_first_run import SMOKE, words


def test_it_starts_what_the_readme_starts() -> None:
    """The words of scripts/smoke: four processes, the example trainer, no word of the shell left."""
    command = words(SMOKE.read_text(encoding="utf-8"))

    assert ["--nproc-per-node", "4"] == command[:2]
    assert "examples/pretrain_gpt.py" in command
    assert not [word for word in command if "$" in word or word == "\\"]
