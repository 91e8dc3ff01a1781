"""Throughput that a job keeps while 1 to 20 % of its hosts are lost, on 64 to 1,024 hosts, by the way it goes on.

`python -m benchmarks.bench_lost_nodes [--record] [--only 64 ...] [--budget-s 5]` compares our templates with planning
anew, with fewer replicas of the same shape, with Varuna's and Bamboo's pipelines, and with pipelines of unequal depth
as Oobleck makes them. All steps are priced by our own cost model; nothing runs.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.lost_nodes import show
from benchmarks.lost_nodes.jobs import CASES, Case, machines
from benchmarks.lost_nodes.paces import Paces
from benchmarks.lost_nodes.show import SHARES, Row
from benchmarks.lost_nodes.ways import Pipelined, SameShape, Searches, Templates, going
from benchmarks.telling import shown

RESULTS = Path(__file__).parent / "results"


def measured_case(case: Case, *, budget_s: float, seed: int) -> show.Outcome:
    """Lose hosts of one case, and price each way to go on."""
    measured = machines(case)
    searches = Searches(case, measured, clock=time.process_time, budget_s=budget_s)
    whole = searches.whole()
    most = math.ceil(max(SHARES) * case.hosts)
    templates = Templates(case, measured, searches, tolerate=most, clock=time.process_time)
    same = SameShape(case, measured, whole.chosen.layout)
    pipelined = Pipelined(case, Paces(case))
    order = random.Random(seed).sample(whole.hosts, case.hosts)
    rows = []
    for lost in sorted({math.ceil(share * case.hosts) for share in SHARES}):
        left = case.hosts - lost
        anew = searches.best(left) if lost else whole
        rows.append(
            Row(
                lost=lost,
                ways={
                    "templates": templates.going(order[:lost]),
                    "planned anew": going(anew) if anew else None,
                    "same shape": same.going(left),
                    "unequal shares": pipelined.uneven(left, covers=False),
                    "unequal depths": pipelined.uneven(left, covers=True),
                    "Varuna": pipelined.varuna(left),
                    "Bamboo": pipelined.bamboo(left),
                },
            )
        )
    each = [templates.going(order[:lost]) for lost in range(most + 1)]
    return show.Outcome(
        case=case,
        whole=going(whole),
        rows=tuple(rows),
        each=tuple(one.step_s if one else math.inf for one in each),
        num_templates=len(templates.plan.templates),
        templates_s=templates.took_s,
    )


def report(cases: list[Case], *, budget_s: float, seed: int) -> Iterator[str]:
    """All of it, a line at a time."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    yield from show.conditions(budget_s=budget_s, seed=seed)
    outcomes = []
    for case in cases:
        outcomes.append(measured_case(case, budget_s=budget_s, seed=seed))
        yield from show.table(outcomes[-1])
    yield from show.summary(outcomes)
    yield from show.days(outcomes)
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    yield f"{len(outcomes)} cases in {took_s:.0f} s, {cpu_s:.0f} of them of one processor."


def main() -> None:
    """Print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/lost_nodes.md as well")
    parser.add_argument("--only", type=int, nargs="*", default=[], help="clusters of so many hosts")
    parser.add_argument("--budget-s", type=float, default=5.0, help="processor seconds for each whole search")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cases = [case for case in CASES if not args.only or case.hosts in args.only]
    text = shown(report(cases, budget_s=args.budget_s, seed=args.seed))
    if args.record:
        (RESULTS / "lost_nodes.md").write_text(f"# Throughput kept while hosts are lost\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
