"""The tables: one line for each case, one for each rival, and under what conditions they came about."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterator
from importlib.metadata import version

from benchmarks.planners.duel import MAPPERS, MEMORY_MARGIN, OWN, RIVALS, Duel, Setting
from benchmarks.planners.machines import MACHINES
from benchmarks.planners.zoo import GLOBAL_BATCH, SEQ_LENGTH, VOCABULARY
from benchmarks.telling import processor


def conditions(setting: Setting, *, is_plain: bool) -> Iterator[str]:
    """Conditions of all figures below."""
    yield (
        f"{time.strftime('%Y-%m-%d', time.gmtime())}; {processor()}, {os.cpu_count()} cores of which one is used, "
        f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}; Python {platform.python_version()}, numpy "
        f"{version('numpy')}; seed {setting.seed}; all seconds of searches are processor seconds"
    )
    yield ""
    yield (
        f"- Predicted, not run: compute and NVLink imagined for the device (`cost.compute`), every plan "
        f"and pick priced by `cost.step.predictor` and fitted by the same memory model, margin {MEMORY_MARGIN:.0%}."
    )
    yield from (f"- {name}: {machine.words}." for name, machine in MACHINES.items())
    yield (
        f"- GPT of Pipette's scripts, sequence {SEQ_LENGTH}, vocabulary {VOCABULARY}, global batch {GLOBAL_BATCH}, "
        f"fp16 with fp32 gradients and Adam."
    )
    yield (
        "- Links: `measured` = shares of 16 real hosts (tests/data/pipette_links_time0.csv, key 0), 8 or 16 of them in "
        "a drawn order, 64 drawn with repetition; `tiered` = leaves of 4 hosts 1.0, pods of 8 0.8, core 0.6, noise of "
        "8 %, one host in 25 at 0.6, allocation shuffled; `mixed cards` = the same with half the hosts at half speed."
    )
    if is_plain:
        yield (
            "- Plain: for everybody no virtual stages, even stages, no recompute (but Varuna's), no sequence "
            "parallelism, no distributed optimizer, no overlap, no CP: what is left is tp, pp, dp, micro-batch, order."
        )
    yield (
        f"- Ours: `search.solve`, margin 0, budget {setting.budget_s:g} s. The user's own configuration is "
        f"{OWN}' pick in torchrun's order; topology-sorted and random place that layout. To picks of AMP, Varuna and "
        f"Pipette we give the distributed optimizer and overlap flags that are fastest for them among those that fit."
    )
    yield (
        "- Varuna takes the largest micro-batch that fits, which at this global batch leaves few of "
        "them; `varuna-any-size` tries every one that fits. `varuna` ranks by its own order of passes, the "
        "others by 1F1B; what runs is Megatron's 1F1B with full recompute."
    )
    yield (
        f"- Pipette's annealer has {setting.pipette_budget_s:g} s for each candidate that could win (its scripts: 10 s "
        f"for each), at 64 hosts some 10,000 steps, by when it is cold; its memory estimate is our closed form with "
        f"its limits, as its network ships without weights."
    )
    yield ""


def head() -> Iterator[str]:
    """Explain the cells, and begin the table."""
    yield (
        "Cells: step time over ours. `(n)`: its pick does not fit, this is the first of its ranking that does, after "
        "n; `oom`: nothing in its ranking fits; `-`: it finds nothing by its own lights. Last columns: our layout in "
        "orders that measure nothing."
    )
    yield ""
    columns = ["case", "ours", "s", "gap", "solve s", *RIVALS, *(f"ours, {name}" for name in MAPPERS)]
    yield f"| {' | '.join(columns)} |"
    yield f"|---|---|{'--:|' * (len(columns) - 2)}"


def row(name: str, found: Duel) -> str:
    """One case."""
    if found.plan is None:
        return (
            f"| {name} | nothing fits: {found.why_not.splitlines()[0][:80]} |{' |' * (3 + len(RIVALS) + len(MAPPERS))}"
        )
    plan = found.plan
    gap = "-" if plan.gap is None else f"{plan.gap:.1%}"
    cells = [name, plan.chosen.layout.words(), f"{plan.chosen.step_time_s:.3f}", gap, f"{plan.solve_s:.2f}"]
    cells += [_cell(found, rival) for rival in RIVALS]
    cells += [f"{found.mapped_s[mapper] / plan.chosen.step_time_s:.3f}" for mapper in MAPPERS]
    return f"| {' | '.join(cells)} |"


def _cell(found: Duel, rival: str) -> str:
    outcome = found.outcomes.get(rival)
    if outcome is None:
        return "-"
    ratio = found.ratio(rival)
    if ratio is None:
        return "oom"
    return f"{ratio:.3f}" + ("" if outcome.fits else f" ({outcome.rank})")


def summary(duels: dict[str, Duel]) -> Iterator[str]:
    """One line for each rival: how much slower it is, and how often it does not fit."""
    solved = {name: found for name, found in duels.items() if found.plan is not None}
    yield ""
    yield (
        f"{len(solved)} of {len(duels)} cases have a plan that fits. Ratios are of what runs: the step of the rival's "
        f"first pick that fits over ours."
    )
    yield ""
    columns = ("rival", "cases", "best for us", "median", "worst for us", "below 1.0 (0.999)", "picks that do not fit")
    columns += ("nothing fits or found", "median as picked, fitting or not", "its search, median s")
    yield f"| {' | '.join(columns)} |"
    yield f"|---|{'--:|' * (len(columns) - 1)}"
    for rival in RIVALS:
        yield _rival_row(rival, solved)
    for mapper in MAPPERS:
        ratios = {
            name: found.mapped_s[mapper] / found.plan.chosen.step_time_s for name, found in solved.items() if found.plan
        }
        yield _line(f"our layout, {mapper}", ratios, ["-", "-", "-", "-"])
    yield ""
    yield "Where each rival is farthest behind and nearest, what it runs there and what we run:"
    yield ""
    for rival in RIVALS:
        yield from _extremes(rival, solved)
    seconds = [found.plan.solve_s for found in solved.values() if found.plan]
    gaps = [found.plan.gap for found in solved.values() if found.plan and found.plan.gap is not None]
    if seconds:
        yield ""
        yield f"Ours: median {statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s a plan"
    if gaps:
        yield f"Gap to the proven floor: median {statistics.median(gaps):.1%}, at most {max(gaps):.1%}"


def _extremes(rival: str, solved: dict[str, Duel]) -> Iterator[str]:
    ratios = {name: ratio for name, found in solved.items() if (ratio := found.ratio(rival)) is not None}
    for pick in (max, min) if ratios else ():
        name = pick(ratios, key=lambda one: ratios[one])
        plan, outcome = solved[name].plan, solved[name].outcomes[rival]
        if plan and outcome.fallback and outcome.fallback_s:
            yield (
                f"- {rival}, {name}: {outcome.fallback.words()}, {outcome.fallback_s:.3f} s; ours "
                f"{plan.chosen.layout.words()}, {plan.chosen.step_time_s:.3f} s ({ratios[name]:.3f})"
            )


def _rival_row(rival: str, solved: dict[str, Duel]) -> str:
    ratios = {name: ratio for name, found in solved.items() if (ratio := found.ratio(rival)) is not None}
    outcomes = [found.outcomes[rival] for found in solved.values() if rival in found.outcomes]
    as_picked = [
        found.outcomes[rival].step_s / found.plan.chosen.step_time_s
        for found in solved.values()
        if found.plan and rival in found.outcomes
    ]
    return _line(
        rival,
        ratios,
        [
            str(sum(not outcome.fits for outcome in outcomes)),
            str(len(solved) - len(ratios)),
            f"{statistics.median(as_picked):.3f}" if as_picked else "-",
            f"{statistics.median(outcome.search_s for outcome in outcomes):.2f}" if outcomes else "-",
        ],
    )


def _line(title: str, ratios: dict[str, float], rest: list[str]) -> str:
    if not ratios:
        return f"| {title} | 0 | - | - | - | - | {' | '.join(rest)} |"
    best, worst = max(ratios, key=lambda name: ratios[name]), min(ratios, key=lambda name: ratios[name])
    below, clearly = (sum(ratio < least for ratio in ratios.values()) for least in (1 - 1e-9, 0.999))
    cells = [
        title,
        str(len(ratios)),
        f"{ratios[best]:.3f} ({best})",
        f"{statistics.median(ratios.values()):.3f}",
        f"{ratios[worst]:.3f} ({worst})",
        f"{below} ({clearly})",
        *rest,
    ]
    return f"| {' | '.join(cells)} |"
