"""Predicted against measured step time, of everything that the other parts of the suite ran. Pure: it runs nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.netlab.suite.parts import PartResult, Say, Setting
from benchmarks.netlab.suite.standings import SKIP
from benchmarks.netlab.system import LabError
from benchmarks.validation.scores import Errors, errors

LEAST_RUNS = 3
"""Fewer have no order worth the name."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One configuration that ran."""

    what: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Error relative to the prediction; below 0 if the step took longer."""
        return self.predicted_s / self.measured_s - 1


def run(setting: Setting, say: Say) -> PartResult:
    """Compare the results of the parts that train.

    Raises:
        LabError: none of them has been run.

    """
    speedup = setting.known.get("speedup", {})
    groups = {
        **_fields("regret", setting.known.get("regret", {})),
        **_fields("NVIDIA's script", setting.known.get("nvidia", {})),
        **_speedup(speedup),
    }
    groups = {name: pairs for name, pairs in groups.items() if pairs}
    if not groups:
        raise LabError("nothing has been run: the parts regret, nvidia and speedup come first")
    say(f"prediction: {sum(map(len, groups.values()))} configurations")
    every = [pair for pairs in groups.values() for pair in pairs]
    orders = [spearman(pairs) for pairs in groups.values() if len(pairs) >= LEAST_RUNS]
    return PartResult(
        name="prediction",
        lines=(
            *_head(),
            *(_row(name, pairs) for name, pairs in groups.items()),
            _row("all", every),
            *_again(repeats(speedup)),
        ),
        raw={
            name: [{"what": one.what, "predicted_s": one.predicted_s, "measured_s": one.measured_s} for one in pairs]
            for name, pairs in groups.items()
        },
        headline=(
            f"mean error {mean_error(every):.1%} of {len(every)} configurations, rank correlation within a network "
            f"{statistics.median(orders) if orders else float('nan'):.2f} in the median (aims: 10 %, 0.9)"
        ),
    )


def _fields(part: str, raw: Mapping[str, Any]) -> Mapping[str, list[Pair]]:
    return {f"{part}: {one['name']}": pairs_of(one["tried"]) for one in raw.get("fields", ())}


def _speedup(raw: Mapping[str, Any]) -> Mapping[str, list[Pair]]:
    """By network: cells of one network have few configurations each, and models that differ."""
    found: dict[str, list[Pair]] = {}
    for cell in raw.get("cells", ()):
        pairs = pairs_of([cell["ours"], *cell["others"]], f"{cell['model']}, ")
        found.setdefault(f"speed-up: {cell['topology']}", []).extend(pairs)
    return found


def repeats(speedup: Mapping[str, Any]) -> list[float]:
    """Return the difference of each training of the speed-up to the last one of the same configuration."""
    found = []
    for cell in speedup.get("cells", ()):
        for one in (cell["ours"], *cell["others"]):
            round_s = [statistics.median(step_s[SKIP:]) for step_s in one.get("step_s", ())]
            found += [abs(later / before - 1) for before, later in pairwise(round_s)]
    return found


def pairs_of(entries: Sequence[Mapping[str, Any]], before: str = "") -> list[Pair]:
    """Read pairs of predicted and measured times from a part's raw figures."""
    return [
        Pair(
            what=f"{before}{one['layout']} on {','.join(map(str, one['placement']))}",
            predicted_s=one["predicted_s"],
            measured_s=one["measured_s"],
        )
        for one in entries
        if one["predicted_s"] and one["measured_s"]
    ]


def mean_error(pairs: Sequence[Pair]) -> float:
    """The mean of how far predictions are off, either way."""
    return _errors(pairs).mean


def spearman(pairs: Sequence[Pair]) -> float:
    """Rank correlation of predicted and measured; 0 where there is no order in one of them."""
    return _errors(pairs).spearman or 0.0


def _errors(pairs: Sequence[Pair]) -> Errors:
    found = errors([pair.predicted_s for pair in pairs], [pair.measured_s for pair in pairs])
    assert found is not None, "somebody has asked for the errors of nothing"
    return found


def _head() -> Iterator[str]:
    yield (
        "Step time that our Predictor foretells from the warm-up's measurements, over the median of the steps that "
        "were run: every configuration of the parts above, whoever chose it. Bias = median of the signed error."
    )
    yield ""
    yield "| runs of | configurations | mean error | bias | within 10 % | rank correlation | worst |"
    yield "|---|--:|--:|--:|--:|--:|---|"


def _again(repeated: Sequence[float]) -> Iterator[str]:
    if repeated:
        yield ""
        yield (
            f"What no prediction can know: trained twice within minutes, a configuration of the speed-up took "
            f"{statistics.mean(repeated):.1%} more or less the second time in the mean, {max(repeated):.0%} at most "
            f"({len(repeated)} pairs)."
        )


def _row(name: str, pairs: Sequence[Pair]) -> str:
    worst = max(pairs, key=lambda pair: abs(pair.error))
    near = sum(abs(pair.error) <= 0.1 for pair in pairs)
    found = _errors(pairs)
    order = f"{spearman(pairs):.2f}" if len(pairs) >= LEAST_RUNS else "-"
    said = f"{worst.what}: {worst.predicted_s * 1e3:.0f} predicted, {worst.measured_s * 1e3:.0f} ms"
    return f"| {name} | {len(pairs)} | {found.mean:.1%} | {found.signed_median:+.1%} | {near} | {order} | {said} |"
