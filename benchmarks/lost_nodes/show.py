"""The tables of throughput kept, and under what conditions they came about."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

from benchmarks.lost_nodes.day import SAVE_S, Loss, checkpoint_interval_s, kept
from benchmarks.lost_nodes.jobs import DEVICE, Case
from benchmarks.lost_nodes.paces import MOST_HOSTS, MOST_STAGES
from benchmarks.lost_nodes.ways import LOOK_S, LOOKS, Going
from benchmarks.telling import processor
from pipette_launch.defaults import SEARCH_BUDGET_S, WARMUP_BUDGET_S

SHARES = (0.0, 0.01, 0.05, 0.10, 0.20)
WAYS = ("templates", "planned anew", "same shape", "unequal shares", "unequal depths", "Varuna", "Bamboo")
NOTICED_S = 8.1
"""Until the hosts that are left agree on a plan after one falls silent: measured, `results/lost_host.md`."""
START_S = 60.0
"""Assumed: a script's start at this scale, its checkpoint loaded; 6 s in the laboratory."""
BETWEEN_S = (6 * 3600.0, 3600.0, 600.0)
LOSSES: Mapping[str, Loss] = {
    "templates": Loss(stands_still_s=NOTICED_S + START_S, loads_checkpoint=True),
    "planned anew": Loss(stands_still_s=NOTICED_S + START_S + WARMUP_BUDGET_S + SEARCH_BUDGET_S, loads_checkpoint=True),
    "same shape": Loss(stands_still_s=NOTICED_S + START_S, loads_checkpoint=True),
    "unequal shares": Loss(stands_still_s=NOTICED_S + START_S, loads_checkpoint=True),
    "unequal depths": Loss(stands_still_s=30.0, loads_checkpoint=False),
    "Varuna": Loss(stands_still_s=701.0, loads_checkpoint=True),
    "Bamboo": Loss(stands_still_s=20.0, loads_checkpoint=False),
}
CONDITIONS = f"""\
- Predicted, not run: equal hosts of 8 {DEVICE} with equal links, computing and links imagined for the device
  (`cost.compute`); every way is priced by `cost.step.predictor` and fitted by the same memory model, margin
  8 %.
- GPT of 32 x 4,096 (6.7B) and 96 x 12,288 (175B), sequence 2,048, bf16, Adam. 6.7B with 1,024 samples a step is
  Oobleck's largest job (stated: the code that reproduces its Figures 9 to 15, `eval_tput_vs_freq.py` and what it
  imports, found in a public index that names no repository; called its simulation below; 30 hosts of one GPU). The
  sizes and the 175B are ours.
- The global batch stays. Hosts are lost one after another in a drawn order, none comes back. Throughput is that of the
  step, as a part of what our plan does with all hosts; *hosts* are those that train.
- *templates*: what the product does: `with_templates` for the loss of up to 20 %, `refit` to the survivors. It has 5 s
  in all, and what it must have takes longer on many hosts (processor seconds, told below).
- *planned anew*: the quickest of plans for at most {LOOKS} numbers of hosts, {LOOK_S:g} s each, the best of them
  searched with the whole budget; which numbers are looked at is told by the product's own rough estimate
  (`search.fewer_hosts`). It is a search, so no bound: templates may be quicker where a budget was short.
- *same shape*: the plan's own layout with fewer replicas, its micro-batch or a smaller one, what a user of torchrun has
  after a start from a checkpoint; the other hosts stand by.
- *unequal shares*: equal pipelines, each with as many micro-batches as it can; devices that are left over stand by.
- *unequal depths*: Oobleck's: depths differ by one, so that every device trains. Both: the best of tp, micro-batch of
  1, 2 or 4, recompute, interleaving, depth up to {MOST_STAGES}, a step being linear in micro-batches, priced beside
  at most {MOST_HOSTS} hosts' replicas; what pipelines of unequal depth cost more for their gradients is left out. Where
  no host is lost these are above or below 100 % by what this line and our search differ in.
- *Varuna*: pp x dp without tp, full recompute, uneven shares of one micro-batch allowed; picked by our prices, which is
  kinder than its own simulator. *Bamboo*: the same with each rank keeping the states of the next stage and running its
  forward (stated: NSDI'23 abstract; uclasystem/bamboo@8080929, `redundancy.py`, `schedule.py`), after all bubbles are
  filled with it (assumed, the kindest reading), and freshly arranged after each loss (assumed; its simulator has steps
  1.5 times as long until then)."""
DAY_WORDS = f"""\
Until 20 % are lost or a day is over, with a loss each 6 h, 1 h and 10 min (Oobleck's frequencies, stated: its
simulation's code). Each loss: templates {NOTICED_S:g} s until a silent host is noticed and a plan agreed on (measured)
and {START_S:g} s of start (assumed; the laboratory's tiny job took 6); planned anew also the product's
{WARMUP_BUDGET_S:g} s of warm-up and {SEARCH_BUDGET_S:g} s of search; Varuna 701 s (stated for 6.7B on 30 GPUs:
Oobleck's simulation); Bamboo 20 s (stated:
its simulator's local rendezvous; neighbours lost together, which restart it, are left
out); unequal depths 30 s (Oobleck's simulation prints 30 s of rebalancing in its example, for a smaller model:
assumed). A checkpoint stops training for {SAVE_S:g} s (assumed), each
{", ".join(f"{checkpoint_interval_s(one):.0f}" for one in BETWEEN_S)} s (Young's rule); half an interval is trained
again, but for Bamboo and unequal depths, which copy states from replicas. Between the rows of the tables throughput
is that of the next row; that of templates is counted for each loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Throughput of each way, by number of lost hosts."""

    lost: int
    ways: Mapping[str, Going | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One case."""

    case: Case
    whole: Going
    rows: tuple[Row, ...]
    each: tuple[float, ...]
    """Seconds of a step under our templates after each loss."""
    num_templates: int
    templates_s: float

    def rate(self, way: str, row: Row) -> float:
        """Throughput as a part of what our plan does with all hosts."""
        found = row.ways[way]
        return self.whole.step_s / found.step_s if found else 0.0

    def rate_after(self, way: str, lost: int) -> float:
        """Rows between take the layout of the next row, since a batch divides by few numbers."""
        if way == "templates":
            return self.whole.step_s / self.each[lost]
        return self.rate(way, min((row for row in self.rows if row.lost >= lost), key=lambda row: row.lost))


def conditions(*, budget_s: float, seed: int) -> Iterator[str]:
    """Conditions of all figures below."""
    yield (
        f"`python -m benchmarks.bench_lost_nodes`, {time.strftime('%Y-%m-%d', time.gmtime())}; {processor()}, "
        f"{os.cpu_count()} cores of which one is used; Python {platform.python_version()}, numpy {version('numpy')}; "
        f"seed {seed}; {budget_s:g} processor seconds for each whole search (the product: {SEARCH_BUDGET_S:g} s)."
    )
    yield ""
    yield from CONDITIONS.splitlines()


def table(outcome: Outcome) -> Iterator[str]:
    """One case: a line for each number of lost hosts."""
    whole = outcome.whole
    yield ""
    yield f"## {outcome.case.name}"
    yield ""
    yield (
        f"All hosts: {whole.layout}, {whole.step_s:.3f} s a step. {outcome.num_templates} templates for up to 20 % of "
        f"losses were made in {outcome.templates_s:.1f} s."
    )
    yield ""
    yield f"| lost | left | {' | '.join(WAYS)} | templates run | planned anew | unequal depths |"
    yield "|--:|--:|" + "--:|" * len(WAYS) + "---|---|---|"
    for row in outcome.rows:
        rates = (f"{outcome.rate(way, row):.1%}" if row.ways[way] else "none fits" for way in WAYS)
        runs = (_runs(row.ways[way]) for way in ("templates", "planned anew", "unequal depths"))
        left = 1 - row.lost / outcome.case.hosts
        yield f"| {row.lost} | {left:.1%} | {' | '.join(rates)} | {' | '.join(runs)} |"


def _runs(found: Going | None) -> str:
    return f"{found.hosts}: {found.layout}" if found else ""


def summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Layouts that stock Megatron cannot express, and the cost of doing without."""
    yield ""
    yield "## What stock Megatron cannot express"
    yield ""
    yield "Equal replicas must share the batch equally. Throughput of templates over that of each way, by hosts lost:"
    yield ""
    yield "| case | " + " | ".join(f"{share:.0%}: unequal shares, depths" for share in SHARES[1:]) + " |"
    yield "|---|" + "---|" * len(SHARES[1:])
    for outcome in outcomes:
        cells = []
        for row in outcome.rows[1:]:
            ours = outcome.rate("templates", row)
            others = [outcome.rate(way, row) for way in ("unequal shares", "unequal depths")]
            cells.append(", ".join(f"{ours / one:.2f}" if one else "-" for one in others))
        yield f"| {outcome.case.name} | {' | '.join(cells)} |"
    rows = [(outcome, row) for outcome in outcomes for row in outcome.rows[1:]]
    gain = max(one.rate("unequal depths", row) / one.rate("unequal shares", row) - 1 for one, row in rows)
    yield ""
    yield f"Depths that differ, beside shares that differ, make a step at most {gain:.1%} shorter in these cases."


def days(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Throughput kept over a day of losses."""
    yield ""
    yield "## A day of losses"
    yield ""
    yield from DAY_WORDS.splitlines()
    yield ""
    yield f"| case | a loss each | hours | {' | '.join(WAYS)} |"
    yield "|---|--:|--:|" + "--:|" * len(WAYS)
    for outcome in outcomes:
        for between_s in BETWEEN_S:
            cells = []
            hours = 0.0
            for way in WAYS:
                part, hours = kept(
                    partial(outcome.rate_after, way),
                    LOSSES[way],
                    between_s=between_s,
                    most_lost=outcome.rows[-1].lost,
                    step_s=outcome.whole.step_s,
                )
                cells.append(f"{part:.1%}")
            yield f"| {outcome.case.name} | {between_s / 60:.0f} min | {hours:.1f} | {' | '.join(cells)} |"
    yield ""
