"""Views of a running job: a screen of named rows, and a line for a log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipette_launch.facts.outcome import LiveJob
from pipette_launch.report.screen import BAR_CELLS, Line, screen, step_words, text
from pipette_launch.text import bytes_text, count_text, duration_text, plural, seconds_text

LEVELS = "▁▂▃▄▅▆▇█"
MOST_VERDICTS = 2
BAD = "bold red"
PHASES = {"warmup": "warm-up", "": "unknown"}


class Row(NamedTuple):
    """One line of the screen of a running job. A row without a name continues the row above."""

    name: str
    words: str
    style: str = "default"


def live_rows(job: LiveJob, steps_s: Sequence[float]) -> Iterator[Row]:
    """Return the rows of a job's screen; `steps_s` has the observed step times, the newest last."""
    where = f" on {job.nodes} nodes, {job.host} first" if job.nodes > 1 else f" on {job.host}" if job.host else ""
    since = [] if job.began_s is None else [f"since {_clock(job.began_s, job.read_s)}"]
    yield Row("Job", ", ".join([*filter(None, [f"{job.script}{where}".strip()]), *since]))
    yield from _phase(job)
    if job.layout:
        yield Row("Plan", f"{job.layout}{f', schedule {job.schedule}' if job.schedule else ''}")
    yield from _progress(job, steps_s)
    yield from _memory(job)
    troubles = _troubles(job)
    yield Row("Failures", ", ".join(troubles) or "no restarts, no lost nodes", BAD if troubles else "dim")
    verdicts = sorted(job.verdicts, key=lambda verdict: not verdict.is_sick)
    for index, verdict in enumerate(verdicts[:MOST_VERDICTS]):
        yield Row("" if index else "Health", verdict.words(), BAD if verdict.is_sick else "default")
    rest = len(verdicts) - MOST_VERDICTS
    if rest > 0:
        yield Row("", f"and {rest} more {plural('finding', rest)}, in the report", "dim")
    written = f"written {duration_text(job.age_s)} ago"
    if job.is_stale:
        yield Row("Data", f"STALE: {written}; the launcher is gone, or cannot write", BAD)
    elif job.printed_s is None:
        yield Row("Data", written, "dim")
    else:
        printed = f"last iteration {duration_text(max(job.read_s - job.printed_s, 0.0))} ago"
        yield Row("Data", f"{written}, {printed}", "dim")


def live_line(job: LiveJob) -> str:
    """Return the state of a job in one line, without the time at which the state was written."""
    parts = [PHASES.get(job.phase, job.phase)]
    if job.phase == "warmup" and job.warmup_phase:
        parts.append(_warmup_words(job))
    if job.iteration is not None:
        parts.append(f"iteration {_iteration_words(job)}")
    if job.step_s is not None:
        parts.append(f"step {_step_words(job, job.step_s)}")
    if job.tokens_per_s is not None:
        parts.append(f"{count_text(job.tokens_per_s)} tokens/s")
    parts += _troubles(job)
    if job.is_stale:
        parts.append("stale: nothing is written any more")
    return ", ".join(parts)


def live_screen(job: LiveJob, steps_s: Sequence[float]) -> str:
    """Show a job on at most 24 lines of 80 columns; `steps_s` has the observed step times, the newest last."""
    sections: list[tuple[str, list[Line]]] = []
    for row in live_rows(job, steps_s):
        if row.name:
            sections.append((row.name, []))
        sections[-1][1].append(text(row.words, row.style))
    return screen("pipette watch", sections, has_gaps=False)


def sparkline(values: Sequence[float]) -> str:
    """Draw one character for each value, as a bar on a scale from 0 to the largest value."""
    most = max(values, default=0.0)
    if most <= 0:
        return LEVELS[0] * len(values)
    return "".join(LEVELS[min(int(max(value, 0.0) / most * len(LEVELS)), len(LEVELS) - 1)] for value in values)


def _troubles(job: LiveJob) -> list[str]:
    restarts = [f"{job.restarts} {plural('restart', job.restarts)}"] if job.restarts else []
    return restarts + ([f"{job.lost_nodes} {plural('node', job.lost_nodes)} lost"] if job.lost_nodes else [])


def _phase(job: LiveJob) -> Iterator[Row]:
    began_s, name = job.phase_began_s, PHASES.get(job.phase, job.phase)
    if job.is_over:
        at = f" at {_clock(began_s, job.read_s)}" if began_s is not None else ""
        took = f" after {duration_text(began_s - job.began_s)}" if began_s and job.began_s is not None else ""
        yield Row("Phase", f"{name}{at}{took}", "green" if job.phase == "succeeded" else BAD)
        return
    lasts = f" for {duration_text(max(job.read_s - began_s, 0.0))}" if began_s is not None else ""
    doing = f": {_warmup_words(job)}" if job.phase == "warmup" and job.warmup_phase else ""
    yield Row("Phase", f"{name}{lasts}{doing}")
    if job.phase == "warmup" and job.warmup_phase_s:
        done = ", ".join(f"{phase} {seconds_text(took)}" for phase, took in job.warmup_phase_s.items())
        yield Row("", f"done: {done}", "dim")


def _warmup_words(job: LiveJob) -> str:
    return f"{job.warmup_phase}, {job.warmup_done} of {job.warmup_total}" if job.warmup_total else job.warmup_phase


def _progress(job: LiveJob, steps_s: Sequence[float]) -> Iterator[Row]:
    if job.iteration is not None:
        yield Row("Iteration", f"{_iteration_words(job)}{_pace_words(job, job.iteration, steps_s)}")
    if job.step_s is not None:
        yield Row("Step", _step_words(job, job.step_s))
    elif job.predicted_step_s is not None:
        yield Row("Step", f"predicted {seconds_text(job.predicted_step_s)}; none is printed yet")
    if len(steps_s) > 1:
        yield Row("", f"{sparkline(steps_s)} {seconds_text(min(steps_s))} to {seconds_text(max(steps_s))}")
    own_s, predicted = job.own_predicted_step_s, job.predicted_tokens_per_s
    if own_s is not None and own_s != job.predicted_step_s:
        yield Row("", f"your own configuration: predicted {seconds_text(own_s)}", "dim")
    if job.tokens_per_s is not None:
        beside = f", predicted {count_text(predicted)}" if predicted is not None else ""
        yield Row("Tokens/s", f"{count_text(job.tokens_per_s)}{beside}")


def _iteration_words(job: LiveJob) -> str:
    return f"{job.iteration:,} of {job.iterations:,}" if job.iterations else f"{job.iteration:,}"


def _pace_words(job: LiveJob, iteration: int, steps_s: Sequence[float]) -> str:
    if not job.iterations or job.is_over:
        return ""
    part = min(max(iteration / job.iterations, 0.0), 1.0)
    full = int(part * BAR_CELLS)
    pace_s = sum(steps_s) / len(steps_s) if steps_s else job.step_s
    left = f" {duration_text((job.iterations - iteration) * pace_s)} left" if pace_s and part < 1 else ""
    return f" {'█' * full}{'░' * (BAR_CELLS - full)}{left}"


def _step_words(job: LiveJob, step_s: float) -> str:
    return step_words(step_s, job.predicted_step_s) if job.predicted_step_s else seconds_text(step_s)


def _memory(job: LiveJob) -> Iterator[Row]:
    need, limit, measured = job.memory_need_bytes, job.memory_limit_bytes, job.measured_memory_bytes
    if need is None:
        return
    of_limit = f" of {bytes_text(limit)} ({need / limit:.0%})" if limit else ""
    beside = f"; measured {bytes_text(measured)}" if measured is not None else ""
    is_bad = limit is not None and max(need, measured or 0) > limit
    yield Row("Memory", f"needs {bytes_text(need)}{of_limit}{beside}", BAD if is_bad else "default")


def _clock(moment_s: float, now_s: float) -> str:
    """Return the local time, with the date unless the moment is today."""
    try:
        then, now = time.localtime(moment_s), time.localtime(now_s)
    except (OverflowError, OSError, ValueError):
        return "an unknown time"
    return time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%Y-%m-%d %H:%M", then)
