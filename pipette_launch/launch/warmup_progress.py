"""How far a warm-up is, on the screen: a line that changes on a terminal, a line for each phase in a log."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

from pipette_launch.printable import printable

if TYPE_CHECKING:
    from pipette_launch.probe.progress import Sign

HEAD = "pipette-launch: "
REFRESH_S = 0.2
CLEAR = "\r\x1b[K"
"""Back to the first column, and nothing on the line."""


class ProgressLine:
    """Shows the signs of one worker, that of RANK 0."""

    def __init__(
        self,
        stream: TextIO,
        *,
        budget_s: float,
        is_terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._budget_s = budget_s
        self._clock = clock
        self._began_s = self._shown_s = clock()
        self._is_terminal = _changes_lines(stream) if is_terminal is None else is_terminal
        self._num_ended = 0
        self._line = ""

    def show(self, sign: Sign | None) -> None:
        """Show a sign, now or soon; cheap to call often."""
        now_s = self._clock()
        if sign is None or now_s - self._shown_s < REFRESH_S:
            return
        self._shown_s = now_s
        if self._is_terminal:
            # A line that is too long would wrap, and then it could not be taken back.
            words = printable(running_words(sign, now_s - self._began_s, self._budget_s))
            line = words[: shutil.get_terminal_size().columns - 1]
            if line != self._line:
                self._stream.write(f"{CLEAR}{line}")
                self._line = line
        else:
            self._end_phases(sign)
        self._stream.flush()

    def close(self, sign: Sign | None) -> None:
        """Take the line off the screen; a log gets what is left to say of the phases."""
        if self._line:
            self._stream.write(CLEAR)
            self._line = ""
        if sign is not None and not self._is_terminal:
            self._end_phases(sign)
        self._stream.flush()

    def _end_phases(self, sign: Sign) -> None:
        for ended in sign.ended[self._num_ended :]:
            words = f": {ended.words}" if ended.words else ""
            self._stream.write(printable(f"{HEAD}{ended.phase} {ended.seconds:.1f} s{words}") + "\n")
        self._num_ended = len(sign.ended)


def running_words(sign: Sign, elapsed_s: float, budget_s: float) -> str:
    """What a terminal shows while the warm-up runs; the budget counts from when all workers have started."""
    if not sign.ended:
        return f"{HEAD}{sign.where()}, {elapsed_s:.0f} s"
    of_budget = f"{max(elapsed_s - sign.ended[0].seconds, 0.0):.0f} of about {budget_s:.0f} s"
    done = ", ".join(f"{ended.phase} {ended.seconds:.1f} s" for ended in sign.ended)
    return f"{HEAD}{of_budget}; {sign.where()}; done: {done}"


def parts_words(phase_s: Mapping[str, float], *, plan_s: float, total_s: float) -> str:
    """What the warm-up took, and its parts; what lies between them is what it took to start and end processes."""
    parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phase_s.items())
    return f"the warm-up took {total_s:.1f} s: {parts}, plan {plan_s:.1f}"


def _changes_lines(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
