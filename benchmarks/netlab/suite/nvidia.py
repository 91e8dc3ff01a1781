"""NVIDIA's own pretrain_gpt.py on every network: the launcher's pick against layouts that were fixed by hand."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

from benchmarks.netlab.compare import launched
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.suite.cases import NUM_HOSTS, NVIDIA, TOPOLOGIES, megatron_lm, nvidia_training
from benchmarks.netlab.suite.contenders import Case, Contender, first_plan, ours
from benchmarks.netlab.suite.direct import trained
from benchmarks.netlab.suite.parts import PartResult, Say, Setting
from benchmarks.netlab.suite.prediction import mean_error, pairs_of, spearman
from benchmarks.netlab.suite.regret import HEADS, Found, Makes, Meter, chosen_and_best, raw, row
from benchmarks.netlab.system import LabError
from benchmarks.rivals.pick import torchrun_order
from benchmarks.stolen import processor_time
from pipette_launch.facts import Layout

FIXED = tuple(
    Layout(tp=tp, pp=pp, dp=dp, etp=tp, vpp=vpp, micro_batch_size=size, use_distributed_optimizer=True)
    for tp, pp, dp, vpp, size in (
        (1, 1, 4, 1, 4),
        (1, 4, 1, 1, 1),
        (1, 4, 1, 1, 2),
        (1, 4, 1, 1, 4),
        (1, 2, 2, 1, 1),
        (1, 2, 2, 1, 2),
        (1, 2, 2, 2, 2),
        (2, 2, 1, 1, 4),
        (2, 2, 1, 2, 4),
        (2, 1, 2, 1, 4),
    )
)
"""The first is torchrun's default."""
ITERATIONS, SKIP = 10, 4
"""The loader's processes and the caches settle in the first steps."""
FINALISTS, FINALS = 3, 1
BUDGET_S = 60.0
QUICK_NETWORKS = ("islands",)


def run(setting: Setting, say: Say) -> PartResult:
    """Measure every network.

    Raises:
        LabError: there is no checkout, or a training that has to run failed.

    """
    checkout = megatron_lm()
    if checkout is None:
        raise LabError("MEGATRON_LM_DIR names no checkout of Megatron-LM")
    found = [_found(name, checkout, setting, say) for name in (QUICK_NETWORKS if setting.quick else TOPOLOGIES)]
    regrets = [one.regret for one in found]
    fields = [raw(one) for one in found]
    pairs = {field["name"]: pairs_of(field["tried"]) for field in fields}
    every = [pair for of_one in pairs.values() for pair in of_one]
    order = statistics.median(spearman(of_one) for of_one in pairs.values())
    gains = [one.default.measured_s / one.choice.measured_s for one in found]
    return PartResult(
        name="nvidia",
        lines=(*_head(), *HEADS, *map(row, found), "", *chosen_and_best(found)),
        raw={"fields": fields},
        headline=(
            f"regret {statistics.median(regrets):.1%} in the median, {max(regrets):.1%} at worst, of {len(found)} "
            f"networks (aims: 5 %, 10 %); mean error of {len(every)} predictions {mean_error(every):.1%} (aim: 8 %), "
            f"rank correlation {order:.2f}; torchrun's default takes {min(gains):.2f} to {max(gains):.2f} times our "
            f"step"
        ),
    )


def _found(name: str, checkout: Path, setting: Setting, say: Say) -> Found:
    with Lab(TOPOLOGIES[name]()) as lab, setting.python(lab, megatron_lm=checkout) as python:
        lab.check()
        say(f"nvidia: {name}, warm-up")
        cache = lab.folder / "plans"
        start = launched(cache, setting.budget_s(BUDGET_S))
        once = nvidia_training(checkout, iterations=1)
        plan, measurements = first_plan(lab, start, once, cache=cache, python=python)
        choice = ours(plan)
        case = Case.of(nvidia_training(checkout, iterations=ITERATIONS), measurements)
        meter = Meter(case, 1, lambda words, order: trained(lab, words, order, python=python).step_s, skip=SKIP)
        before = processor_time()
        chosen = meter.tried(choice.layout, choice.placement)
        default = meter.tried(case.job.own, torchrun_order(NUM_HOSTS))
        for layout in FIXED[1:]:
            meter.tried(layout, best_placed(case, layout).placement)
        meter.finals((chosen, default), finalists=1 if setting.quick else FINALISTS, rounds=FINALS)
        for one in (chosen, default):
            if one.failure:
                raise LabError(f"{one.run.layout.words()}: {one.failure}")
        say(f"nvidia: {name}, {chosen.measured_s * 1e3:.0f} ms, default {default.measured_s * 1e3:.0f} ms")
        return Found(
            name=name,
            of=len(FIXED) + 1,
            tried=tuple(sorted(meter.done(), key=lambda each: each.measured_s)),
            failed=tuple(each for each in meter.all() if not each.step_s),
            choice=chosen,
            default=default,
            stolen=processor_time().stolen_since(before),
        )


def best_placed(case: Makes, layout: Layout) -> Contender:
    """Put a layout on the hosts in the order that is predicted to be the quickest; torchrun's where none is priced."""
    made = [case.contender("", layout, order) for order in permutations(range(NUM_HOSTS))]
    return min(made, key=lambda one: one.predicted_s or 0.0)


def _head() -> Iterator[str]:
    yield (
        f"pretrain_gpt.py {NVIDIA}. The launcher's pick, with every choice free, beside {len(FIXED)} layouts fixed by "
        f"hand, each on the hosts in the order that is predicted to be the quickest (torchrun's default in torchrun's "
        f"order); {ITERATIONS} iterations, {SKIP} not counted; then the quickest {FINALISTS}, the pick and the default "
        f"{FINALS} time more in turns, which names the best, and {FINALS} time once more, and of these only that "
        f"counts. Stolen = processor time that other virtual machines took."
    )
