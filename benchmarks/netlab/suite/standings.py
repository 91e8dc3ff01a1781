"""Who was how fast in one cell of the suite, and what all cells say together. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.netlab.compare import Ended
from benchmarks.netlab.suite.contenders import OWN, RIVALS

SKIP = 6
"""Iterations at the start of a training that do not count."""
COLUMNS = (OWN, *RIVALS)
LEAST_NOISE = 0.02
"""Two rounds may agree by chance: less than this is never called a difference."""


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """One configuration, as it ran."""

    names: tuple[str, ...]
    layout: str
    placement: tuple[int, ...]
    """RANK of each host."""
    predicted_s: float | None
    rounds: tuple[Ended, ...]
    """Empty where a training failed."""
    failure: str = ""

    @property
    def round_s(self) -> tuple[float, ...]:
        """The steady step of each round."""
        return tuple(one.steady_s(SKIP) for one in self.rounds)

    @property
    def measured_s(self) -> float | None:
        """The median of all steady steps; None where it failed."""
        steps = [step_s for one in self.rounds for step_s in one.step_s[SKIP:]]
        return statistics.median(steps) if steps else None

    @property
    def spread(self) -> float:
        """Largest over smallest round, less one."""
        return max(self.round_s) / min(self.round_s) - 1 if self.rounds else 0.0


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model on one network."""

    topology: str
    model: str
    ours: Entrant
    others: tuple[Entrant, ...]
    refused: dict[str, str]
    """Why a rival would run nothing, by its name."""

    def other(self, name: str) -> Entrant | None:
        """Configuration of a rival."""
        return next((one for one in self.others if name in one.names), None)

    def ratios(self, name: str) -> tuple[float, ...]:
        """Round by round, the rival's step over ours; empty where one of them did not run."""
        other = self.other(name)
        if other is None:
            return ()
        return tuple(theirs / own for theirs, own in zip(other.round_s, self.ours.round_s, strict=False))

    def ratio(self, name: str) -> float | None:
        """The median of the rounds."""
        ratios = self.ratios(name)
        return statistics.median(ratios) if ratios else None

    @property
    def noise(self) -> float:
        """Noise of this cell: the larger spread of our rounds and torchrun's."""
        own = self.other(OWN)
        return max(LEAST_NOISE, self.ours.spread, own.spread if own else 0.0)

    @property
    def is_slower(self) -> bool:
        """Return whether pipette-launch was slower than torchrun beyond noise."""
        ratio = self.ratio(OWN)
        return ratio is not None and ratio < 1 / (1 + self.noise)

    def agreement(self) -> str:
        """Return whether losses of our layouts agree to the digit, and the largest difference of other layouts."""
        same, apart, wrong = 0, [], []
        for one in self.others:
            for theirs, own in zip(one.rounds, self.ours.rounds, strict=False):
                if theirs.losses == own.losses:
                    same += 1
                elif one.layout == self.ours.layout:
                    wrong.append("/".join(one.names))
                else:
                    apart.append(distance(theirs.losses, own.losses))
        words = [f"**{name} differs under the same layout**" for name in dict.fromkeys(wrong)]
        words += [f"{same} equal"] if same else []
        words += [f"{len(apart)} other layouts, at most {max(apart):.2%} apart"] if apart else []
        return "; ".join(words) or "-"


def distance(losses: Sequence[str], others: Sequence[str]) -> float:
    """The largest relative distance of two trainings' losses, iteration by iteration."""
    both = zip(map(float, losses), map(float, others), strict=False)
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in both)


def lines(cells: Sequence[Cell]) -> Iterator[str]:
    """The table, with what needs explaining below it."""
    yield f"| network | model | what pipette-launch ran | ms | {' | '.join(COLUMNS)} | noise | losses |"
    yield f"|---|---|---|--:|{'--:|' * len(COLUMNS)}--:|---|"
    for cell in cells:
        took_s = cell.ours.measured_s
        shown = f"{took_s * 1e3:.0f}" if took_s else f"failed: {cell.ours.failure}"
        ratios = " | ".join(_ratio_words(cell, name) for name in COLUMNS)
        what = f"{cell.ours.layout}, ranks {' '.join(map(str, cell.ours.placement))}"
        yield (
            f"| {cell.topology} | {cell.model} | {what} | {shown} | {ratios} | {cell.noise:.1%} | {cell.agreement()} |"
        )
    yield ""
    yield "What the others ran, and how many ms a step took:"
    yield ""
    for cell in cells:
        ran = [_ran_words(one) for one in cell.others]
        ran += [f"{name}: found nothing ({reason})" for name, reason in cell.refused.items()]
        yield f"- {cell.topology}, {cell.model}: {'; '.join(ran)}"


def _ratio_words(cell: Cell, name: str) -> str:
    ratios = cell.ratios(name)
    if not ratios:
        return "nothing" if name in cell.refused else "failed"
    middle = f"{statistics.median(ratios):.2f}"
    return middle if len(ratios) == 1 else f"{middle} ({min(ratios):.2f}-{max(ratios):.2f})"


def _ran_words(one: Entrant) -> str:
    took_s = one.measured_s
    what = f"{' = '.join(one.names)}: {one.layout}, ranks {' '.join(map(str, one.placement))}"
    return f"{what}, {took_s * 1e3:.0f}" if took_s else f"{what}, failed ({one.failure})"


def headline(cells: Sequence[Cell]) -> str:
    """One sentence: how much faster than each, how far it went, and how often it was slower than torchrun."""
    means = []
    for name in COLUMNS:
        ratios = [ratio for cell in cells if (ratio := cell.ratio(name)) is not None]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            means.append(f"{mean:.2f} x {name} ({min(ratios):.2f} to {max(ratios):.2f})")
    slower = [f"{cell.topology} {cell.model}" for cell in cells if cell.is_slower]
    failed = sum(not cell.ours.rounds for cell in cells)
    named = f" ({', '.join(slower)})" if slower else ""
    return (
        f"step time, geometric mean (least to most) over {len(cells)} cells: {', '.join(means) or 'nothing ran'}; "
        f"slower than torchrun beyond noise in {len(slower)}{named}{f'; failed in {failed}' if failed else ''}"
    )
