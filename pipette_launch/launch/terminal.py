"""The lines that a node prints about a job: decisions, plans, and the progress of a phase."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import Event, Thread
from typing import TextIO

from pipette_launch.defaults import LINKS_BUDGET_S
from pipette_launch.facts import Measurements, Plan
from pipette_launch.facts.messages import Decision, RunTraining, RunTrial, RunWarmup, Stop
from pipette_launch.launch.cache import Cache
from pipette_launch.launch.options import Options
from pipette_launch.launch.plan_reports import existing_page
from pipette_launch.launch.trials import trial_words
from pipette_launch.probe.progress import PhaseEnd, Sign
from pipette_launch.report.measured import measured_screen
from pipette_launch.report.plan import chosen_line, plan_screen
from pipette_launch.text import HEAD, counted, printable, say

REFRESH_S = 0.2
LOG_S = 10.0
"""Shortest time (s) between two progress lines in a log."""
CLEAR = "\r\x1b[K"
"""Terminal codes that move to the first column and clear the line."""
SHOWN_HOSTS = 4


# -- progress -----------------------------------------------------------------------------------------------------


class ProgressLine:
    """One progress line that changes in place on a terminal. A log gets a new line from time to time."""

    def __init__(self, stream: TextIO, *, head: str = HEAD, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._head = head
        self._clock = clock
        self._began_s = self._shown_s = clock()
        self._is_terminal = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._num_ended = 0
        self._line = ""

    def show(self, running: Callable[[float], str], ended: Sequence[str] = ()) -> None:
        """Show the progress now or soon; cheap to call often.

        `running` returns the line for a number of elapsed seconds. A log gets the lines of the `ended` parts instead.
        """
        now_s = self._clock()
        if now_s - self._shown_s < (REFRESH_S if self._is_terminal else LOG_S):
            return
        self._shown_s = now_s
        words = printable(f"{self._head}{running(now_s - self._began_s)}")
        if not self._is_terminal:
            if not self._log(ended):
                self._stream.write(f"{words}\n")
        else:
            # A line longer than the terminal would wrap, and a wrapped line cannot be cleared.
            line = words[: shutil.get_terminal_size().columns - 1]
            if line != self._line:
                self._stream.write(f"{CLEAR}{line}")
                self._line = line
        self._stream.flush()

    def close(self, ended: Sequence[str] = ()) -> None:
        """Clear the line. In a log, print the ended parts that are not in the log yet."""
        if self._line:
            self._stream.write(CLEAR)
            self._line = ""
        if not self._is_terminal:
            self._log(ended)
        self._stream.flush()

    def _log(self, ended: Sequence[str]) -> bool:
        """Print the newly ended parts on one line; return false if no part has ended since the last line."""
        news = ended[self._num_ended :]
        self._num_ended = len(ended)
        if news:
            self._stream.write(printable(f"{self._head}{'; '.join(news)}") + "\n")
        return bool(news)


@contextmanager
def ticking(line: ProgressLine, running: Callable[[float], str]) -> Iterator[None]:
    """Show a progress line again and again while the block runs, and clear it at the end."""
    is_over = Event()

    def tick() -> None:
        while not is_over.wait(REFRESH_S):
            line.show(running)

    ticker = Thread(target=tick, name="progress", daemon=True)
    ticker.start()
    try:
        yield
    finally:
        is_over.set()
        ticker.join()
        line.close()


def running_words(sign: Sign, elapsed_s: float, budget_s: float) -> str:
    """Return the progress of a warm-up. The warm-up's budget starts when all workers have started."""
    if not sign.ended:
        return f"{sign.where()}, {elapsed_s:.0f} s"
    of_budget = f"{max(elapsed_s - sign.ended[0].seconds, 0.0):.0f} of about {budget_s:.0f} s"
    done = ", ".join(f"{ended.phase} {ended.seconds:.1f} s" for ended in sign.ended)
    return f"{of_budget}; {sign.where()}; done: {done}"


def ended_words(ended: PhaseEnd) -> str:
    """Return the log line of a finished part of the warm-up."""
    words = f": {ended.words}" if ended.words else ""
    return f"{ended.phase} {ended.seconds:.1f} s{words}"


def parts_words(phase_s: Mapping[str, float], *, plan_s: float, total_s: float) -> str:
    """Return the duration of a warm-up and of its parts. Starting and ending processes takes the remaining time."""
    parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phase_s.items())
    return f"the warm-up took {total_s:.1f} s: {parts}, plan {plan_s:.1f}"


# -- decisions ----------------------------------------------------------------------------------------------------


class Terminal:
    """Prints lines to stderr, depending on --pipette-quiet and --pipette-verbose, and screens without `HEAD`."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._is_quiet, self._budget_s = options.detail == "quiet", options.budget_s
        self._shown: tuple[Plan, int] | None = None
        self._warmup = ProgressLine(sys.stderr)
        self._progress = ExitStack()

    def warn(self, words: str) -> None:
        """Print a line that --pipette-quiet does not hide."""
        say(words)

    def say(self, words: str) -> None:
        """Print a line unless --pipette-quiet is given."""
        if not self._is_quiet:
            self.warn(words)

    def tell(self, decision: Decision, measurements: Measurements | None, cache: Cache) -> None:
        """Print a decision. `measurements` (None if unknown) priced its plan, and `cache` has the plan's files."""
        # If the job failed before any plan was shown, torch prints the error.
        is_printed = isinstance(decision, Stop) and decision.failed and self._shown is None
        if decision.reason and not is_printed:
            (self.say if isinstance(decision, RunTrial) else self.warn)(decision.reason)
        if isinstance(decision, RunWarmup):
            self._announce(decision)
        elif isinstance(decision, RunTrial):
            self.say(trial_words(decision, asked=self._options.trials))
        else:
            shown = decision.unrun if isinstance(decision, Stop) else decision
            if isinstance(shown, RunTraining) and shown.plan is not None:
                self._show_plan(shown, shown.plan, measurements, cache)
            elif self._options.probe_to is not None and measurements is not None:
                path = self._options.probe_to
                sys.stdout.write(measured_screen(measurements, title="pipette probe", saved_to=path))
                sys.stdout.flush()

    def _announce(self, warmup: RunWarmup) -> None:
        self._warmup = ProgressLine(sys.stderr)
        hosts, slots = warmup.hosts, counted(warmup.num_ranks, "slot")
        what, self._budget_s = slots, self._options.budget_s
        if warmup.only_links:
            what, self._budget_s = f"the links of {slots}", min(self._budget_s, LINKS_BUDGET_S)
        others = " and others" if len(hosts) > SHOWN_HOSTS else ""
        self.say(
            f"measuring {what} on {', '.join(hosts[:SHOWN_HOSTS])}{others}, about {self._budget_s:.0f} s at most after "
            "their imports"
        )

    def _show_plan(self, decision: RunTraining, plan: Plan, measurements: Measurements | None, cache: Cache) -> None:
        if self._shown == (plan, decision.attempt):
            return
        self._shown = (plan, decision.attempt)
        if decision.is_refitted:
            return  # The decision's reason names the plan, so a long screen would only delay the job.
        if decision.attempt > 0:
            choice = decision.choice
            own = "your own configuration, in torchrun's order"
            what = f"the next plan, {choice.layout.words()}" if choice else own
            self.warn(f"that plan cannot {'go on' if decision.iteration else 'start'}; going on with {what}")
        elif self._is_quiet:
            self.warn(chosen_line(plan))
        else:
            sys.stderr.write(
                plan_screen(
                    plan,
                    measurements,
                    arguments=self._options.script_arguments,
                    new_arguments=decision.script_arguments,
                    saved_to=self._options.plan or cache.plan_path,
                    drawn_to=None
                    if self._options.plan
                    else existing_page(cache.plan_path, is_due=plan.provenance.source == "measured"),
                    unsaved=cache.trouble,
                    is_whole=self._options.detail == "verbose",
                )
            )
            sys.stderr.flush()

    def warmup_goes_on(self, sign: Sign | None) -> None:
        """Show the progress of a warm-up from the last report (sign) of RANK 0. Callers may call this method often."""
        if sign is not None and not self._is_quiet:
            told, budget_s = sign, self._budget_s
            ended = [ended_words(one) for one in sign.ended]
            self._warmup.show(lambda elapsed_s: running_words(told, elapsed_s, budget_s), ended)

    def warmup_is_over(self, sign: Sign | None) -> None:
        """Clear the progress line of the warm-up."""
        if not self._is_quiet:
            self._warmup.close([ended_words(one) for one in sign.ended] if sign else ())

    def begin(self, running: Callable[[float], str]) -> None:
        """Show a progress line until `end`. `running` returns the line for a number of elapsed seconds."""
        self.end()
        if not self._is_quiet:
            self._progress.enter_context(ticking(ProgressLine(sys.stderr), running))

    def end(self) -> None:
        """Clear the progress line of `begin`, if there is one."""
        self._progress.close()
