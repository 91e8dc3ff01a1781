"""NVIDIA's own pretrain_gpt.py on every network: the launcher's pick against layouts that were fixed by hand.

Every step is predicted twice from the same measurements: with the measured seconds of whole stages, and without them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

from benchmarks.netlab.compare import launched
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.suite.cases import NUM_HOSTS, NVIDIA, TOPOLOGIES, megatron_lm, nvidia_training
from benchmarks.netlab.suite.contenders import Case, Contender, first_plan, ours
from benchmarks.netlab.suite.direct import trained
from benchmarks.netlab.suite.parts import PartResult, Say, Setting
from benchmarks.netlab.suite.prediction import mean_error, pairs_of, spearman
from benchmarks.netlab.suite.regret import HEADS, Found, Makes, Meter, Tried, chosen_and_best, raw, row
from benchmarks.netlab.system import LabError
from benchmarks.rivals.pick import torchrun_order
from benchmarks.stolen import processor_time
from pipette_launch.facts import Layout, Measurements

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
    both = [_found(name, checkout, setting, say) for name in (QUICK_NETWORKS if setting.quick else TOPOLOGIES)]
    found = [one for one, _ in both]
    regrets = [one.regret for one in found]
    fields = [{**raw(one), **more} for one, more in both]
    plain = [
        [{**one, "predicted_s": seconds} for one, seconds in zip(field["tried"], field["plain_s"], strict=True)]
        for field in fields
    ]
    gains = [one.default.measured_s / one.choice.measured_s for one in found]
    return PartResult(
        name="nvidia",
        lines=(*_head(), *HEADS, *map(row, found), "", *chosen_and_best(found), "", *_stages(fields)),
        raw={"fields": fields},
        headline=(
            f"regret {statistics.median(regrets):.1%} in the median, {max(regrets):.1%} at worst, of {len(found)} "
            f"networks (aims: 3 %, 6 %); {_errors([field['tried'] for field in fields])} (aims: 6 %, 0.9), without "
            f"the measured seconds of stages {_errors(plain)}; torchrun's default takes {min(gains):.2f} to "
            f"{max(gains):.2f} times our step"
        ),
    )


def _errors(fields: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    pairs = [pairs_of(tried) for tried in fields]
    every = [pair for of_one in pairs for pair in of_one]
    order = statistics.median(map(spearman, pairs))
    return f"mean error of {len(every)} predictions {mean_error(every):.1%}, rank correlation {order:.2f}"


def _stages(fields: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "Measured seconds of one micro-batch on whole stages, all passes, and what the predictor made of them:"
    yield ""
    for field in fields:
        yield f"- {field['name']}: {', '.join(field['stages']) or 'no stage was timed'}. {field['note']}"


def without_times(measured: Measurements) -> Measurements:
    """Return the measurements as if the steps of whole stages had not been timed."""
    return replace(measured, stages=tuple(replace(one, num_microbatches=0) for one in measured.stages))


def _more(case: Case, tried: Sequence[Tried]) -> Mapping[str, Any]:
    """Return the stages that were timed, and the steps that are predicted without their seconds."""
    plain = replace(case, measurements=without_times(case.measurements))
    runs = [one.run for one in tried]
    timed = case.measurements.timed_stages_of(case.job)
    return {
        "stages": [
            f"stage {one.pp_rank} of {one.layout.words()} {one.schedule_s / one.num_microbatches * 1e3:.0f} ms"
            for one in timed
        ],
        "note": case.predictor.compute.stages_note,
        "plain_s": [plain.contender("", run.layout, run.placement).predicted_s for run in runs],
    }


def _found(name: str, checkout: Path, setting: Setting, say: Say) -> tuple[Found, Mapping[str, Any]]:
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
        tried = tuple(sorted(meter.done(), key=lambda each: each.measured_s))
        result = Found(
            name=name,
            of=len(FIXED) + 1,
            tried=tried,
            failed=tuple(each for each in meter.all() if not each.step_s),
            choice=chosen,
            default=default,
            stolen=processor_time().stolen_since(before),
        )
        return result, _more(case, tried)


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
