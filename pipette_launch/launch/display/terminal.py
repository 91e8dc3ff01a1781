"""What one node prints of a job: the plan, how far the work on it is, and what came of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from pipette_launch import report
from pipette_launch.launch.display.progress import HEAD, ProgressLine, Ticker, ended_words, running_words
from pipette_launch.launch.trials.watch import trial_words
from pipette_launch.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pipette_launch.facts import Measurements, Plan
    from pipette_launch.facts.messages import Decision
    from pipette_launch.launch.options import Options
    from pipette_launch.probe.messages import Sign

SHOWN_HOSTS = 4


class Kept(NamedTuple):
    """Where a plan lies."""

    plan: Path | None = None
    """Its file, if there is one."""
    page: Path | None = None
    """Its report, an HTML file, if there is one."""
    unsaved: str = ""
    """Why there is no file, and what to do; empty where none was wanted."""


class Terminal:
    """Prints to stderr, as much as the user asked for; every line outside a screen begins alike."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._is_quiet = options.detail == "quiet"
        self._shown: tuple[Plan, int] | None = None
        self._warmup = ProgressLine(sys.stderr)
        self._ticker: Ticker | None = None

    def warn(self, words: str) -> None:
        """Print what nobody should miss."""
        sys.stderr.write(f"{HEAD}{printable(words)}\n")
        sys.stderr.flush()

    def say(self, words: str) -> None:
        """Print what --pipette-quiet leaves out."""
        if not self._is_quiet:
            self.warn(words)

    def tell(self, decision: Decision, measurements: Measurements | None, kept: Kept) -> None:
        """Print what was decided; `measurements` are what the plan rests on, where that is known."""
        # Without a plan torch's own words of a failure are all.
        if decision.reason and not (decision.failed and self._shown is None):
            is_trial = decision.phase == "trial" and not decision.checks_order
            (self.say if is_trial else self.warn)(decision.reason)
        options = self._options
        if decision.phase == "warmup":
            self._warmup = ProgressLine(sys.stderr)
            self.say(
                f"measuring {sum(decision.num_slots)} slots on {', '.join(decision.hosts[:SHOWN_HOSTS])}"
                f"{' and others' if len(decision.hosts) > SHOWN_HOSTS else ''}, "
                f"about {options.budget_s:.0f} s at most once their imports are done"
            )
        elif decision.phase == "trial" and decision.plan is not None:
            self.say(trial_words(decision, asked=options.trials))
        elif decision.plan is not None:
            self._show_plan(decision, decision.plan, measurements, kept)
        elif decision.phase == "stop" and options.probe_to is not None and measurements is not None:
            sys.stdout.write(report.measured_screen(measurements, title="pipette probe", saved_to=options.probe_to))
            sys.stdout.flush()

    def _show_plan(self, decision: Decision, plan: Plan, measurements: Measurements | None, kept: Kept) -> None:
        if self._shown == (plan, decision.attempt):
            return
        self._shown = (plan, decision.attempt)
        if decision.is_refitted:
            return  # The reason names it, and whoever waits for the job to go on needs no more.
        if decision.attempt > 0:
            choice = decision.choice
            what = (
                f"the next plan, {choice.layout.words()}" if choice else "your own configuration, in torchrun's order"
            )
            self.warn(f"that plan cannot {'go on' if decision.iteration else 'start'}; going on with {what}")
        elif self._is_quiet:
            self.warn(report.chosen_line(plan))
        else:
            sys.stderr.write(
                report.plan_screen(
                    plan,
                    measurements,
                    arguments=self._options.script_arguments,
                    new_arguments=decision.script_arguments,
                    saved_to=self._options.plan or kept.plan,
                    drawn_to=kept.page,
                    unsaved=kept.unsaved,
                    is_whole=self._options.detail == "verbose",
                )
            )
            sys.stderr.flush()

    def warmup_goes_on(self, sign: Sign | None) -> None:
        """Show how far a warm-up is, by what the worker of RANK 0 said last; cheap to call often."""
        if sign is not None and not self._is_quiet:
            told, budget_s = sign, self._options.budget_s
            ended = [ended_words(one) for one in sign.ended]
            self._warmup.show(lambda elapsed_s: running_words(told, elapsed_s, budget_s), ended)

    def warmup_is_over(self, sign: Sign | None) -> None:
        """Take its line off the screen."""
        if not self._is_quiet:
            self._warmup.close([ended_words(one) for one in sign.ended] if sign else ())

    def begin(self, running: Callable[[float], str]) -> None:
        """Show how far something else is until `end`; `running` says it, told for how many seconds it has gone on."""
        self.end()
        if not self._is_quiet:
            self._ticker = Ticker(ProgressLine(sys.stderr), running)

    def end(self) -> None:
        """Take that line off the screen, if there is one."""
        if self._ticker is not None:
            self._ticker.stop()
            self._ticker = None
