"""Parts of the warm-up's benchmark: each runs real warm-ups and yields the results as lines of Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.netlab import Lab, LabError, Topology, topology
from benchmarks.stolen import processor_time
from benchmarks.warmup.score import APART, TOLERANCE, Compared, Fault, compared, judged, outside, ranked
from benchmarks.warmup.trial import HEALTHY_KINDS, Trial, healthy, steps, warm_up
from pipette_launch.facts import Measurements

LEAST_MBIT, MOST_MBIT = 100.0, 1000.0
USUAL_MBIT = 400.0
ACCURACY = ((4, 1, True, 1), (8, 1, True, 2), (4, 1, False, 3), (8, 1, False, 4), (4, 2, False, 5))
"""(hosts, slots of each, whether both directions of a link are equally fast, seed)"""
CHECKS = 4
"""Number of attempts of plain sockets to reach the set rates, on a machine with other load."""
MOST_STOLEN = 0.02
"""If other machines took more than this share of the processor time, the warm-up is repeated; the table has both."""
ATTEMPTS = 3


def accuracy(*, runs: int) -> Iterator[str]:
    """Measure unequal links: the error of each bandwidth, and whether the ranking of links is right."""
    rates = steps(LEAST_MBIT, MOST_MBIT, APART)
    yield f"Rates from {rates[0]:g} to {rates[-1]:g} Mbit/s, each {APART - 1:.0%} above the last, shuffled by a seed."
    yield "The order of equal rates does not count. Before each run, plain sockets reached every rate within 10 %,"
    yield f"in one of at most {CHECKS} checks. Stolen = processor time that other virtual machines took during the run;"
    yield f"above {MOST_STOLEN:.0%} the case runs again, up to {ATTEMPTS} times, and the table shows all runs."
    yield "Slots of one host share its wires, so each should get its share of the rate while all send."
    yield ""
    yield (
        "| hosts x slots | links | seed | ways | off by 10 % | median error | worst | unequal pairs | misplaced | s "
        "| checks | stolen |"
    )
    yield "|---|---|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|"
    for num_hosts, slots, symmetric, seed in ACCURACY[:runs]:
        made = topology.uneven(num_hosts, rates, seed=seed, symmetric=symmetric, slots=slots)
        kind = "the same both ways" if symmetric else "each way its own"
        for _ in range(ATTEMPTS):
            with Lab(made) as lab:
                checks = _checked(lab)
                before = processor_time()
                trial = warm_up(lab, "trial")
                stolen = processor_time().stolen_since(before)
            found = trial.failure or _accuracy(compared(made, trial.need()))
            found = f"{found} | {trial.wall_s:.0f} | {checks} | {stolen:.0%}"
            yield f"| {num_hosts} x {slots} | {kind} | {seed} | {found} |"
            if stolen <= MOST_STOLEN:
                break


def _accuracy(rows: Sequence[Compared]) -> str:
    pairs, wrong = ranked(rows)
    worst = max(rows, key=lambda row: abs(row.error))
    middle = statistics.median(abs(row.error) for row in rows)
    return f"{len(rows)} | {len(outside(rows))} | {middle:.1%} | {worst.words()} | {pairs} | {len(wrong)}"


def _checked(lab: Lab) -> int:
    """Check the set rates with plain sockets; returns the number of checks.

    Raises:
        LabError: no check reached the rates.

    """
    for number in range(1, CHECKS):
        try:
            lab.check()
        except LabError:
            continue
        return number
    lab.check()
    return CHECKS


FAULTS: tuple[tuple[int, str, tuple[Fault, ...]], ...] = (
    (4, "uniform", (Fault(host="n1", peer="n3", level=100),)),
    (4, "uniform", (Fault(host="n2", peer="n0", level=200, one_way=True),)),
    (6, "two islands", (Fault(host="n0", peer="n1", level=300),)),
    (4, "uniform", (Fault(host="n2", level=0.3),)),
    (4, "uniform", (Fault(host="n0", level=0.5),)),
    (4, "nearly uniform", (Fault(host="n1", peer="n2", level=100), Fault(host="n3", level=0.4))),
)
"""(hosts, network, faults). The usual rate is 400 Mbit/s; on two islands 800 within and 200 between.

Islands have three hosts, because with two there is no other link to compare with.
"""


def faults(*, runs: int) -> Iterator[str]:
    """Measure throttled links and slowed devices: whether each fault is named, and nothing else."""
    yield "One slot on each host. Found = a verdict names the slowed host's device, or the link in a slow direction."
    yield ""
    yield "| hosts | network | fault | found | false | verdicts |"
    yield "|--:|---|---|---|---|---|"
    for num_hosts, kind, wrong in FAULTS[:runs]:
        made = healthy(kind, num_hosts, rate_mbit=USUAL_MBIT)
        with Lab(made) as lab:
            _checked(lab)
            for fault in wrong:
                _inflict(lab, fault)
            trial = warm_up(lab, "trial")
        if trial.failure:
            yield f"| {num_hosts} | {kind} | {trial.failure} |"
            continue
        measured = trial.need()
        missed, false = judged(measured.verdicts, wrong)
        said = "<br>".join(verdict.words() for verdict in measured.verdicts) or "nothing"
        found = f"{len(wrong) - len(missed)} of {len(wrong)}"
        made_wrong = "; ".join(fault.words() for fault in wrong)
        yield f"| {num_hosts} | {kind} | {made_wrong} | {found} | {len(false)} | {said} |"


def _inflict(lab: Lab, fault: Fault) -> None:
    if fault.peer:
        lab.throttle((fault.host, fault.peer), fault.level, one_way=fault.one_way)
    else:
        lab.slow(fault.host, fault.level)


def alarms(*, runs: int) -> Iterator[str]:
    """Measure healthy networks: the number of false alarms."""
    yield f"{runs} warm-ups, four hosts with one slot each. Verdicts that report a fault are false alarms."
    yield ""
    yield "| run | network | faults | notes | off by 10 % | worst | wall s | verdicts |"
    yield "|--:|---|--:|--:|--:|---|--:|---|"
    total = failed = 0
    for run in range(runs):
        kind = HEALTHY_KINDS[run % len(HEALTHY_KINDS)]
        made = healthy(kind, 4, rate_mbit=USUAL_MBIT, seed=run)
        with Lab(made) as lab:
            trial = warm_up(lab, "trial")
        if trial.failure:
            failed += 1
            yield f"| {run + 1} | {kind} | {trial.failure} |"
            continue
        verdicts = trial.need().verdicts
        sick = [verdict for verdict in verdicts if verdict.is_sick]
        total += len(sick)
        rows = compared(made, trial.need())
        worst = max(rows, key=lambda row: abs(row.error))
        said = "<br>".join(verdict.words() for verdict in verdicts) or "nothing"
        counts = (
            f"{len(sick)} | {len(verdicts) - len(sick)} | {len(outside(rows))} | {worst.words()} | {trial.wall_s:.0f}"
        )
        yield f"| {run + 1} | {kind} | {counts} | {said} |"
    yield ""
    yield f"False alarms: {total} in {runs - failed} healthy runs; {failed} warm-ups failed."


def duration(*, runs: int) -> Iterator[str]:
    """Measure the time of a warm-up by phase, on eight hosts with one process each."""
    made = healthy("uniform", 8, rate_mbit=USUAL_MBIT)
    with Lab(made) as lab:
        _checked(lab)
        trials = [warm_up(lab, f"trial{run}") for run in range(runs)]
    yield f"Eight hosts, one slot each, all links {USUAL_MBIT:g} Mbit/s. Seconds of the slowest worker in each phase."
    yield ""
    phases = list(trials[0].need().phase_s)
    yield f"| run | {' | '.join(phases)} | warm-up | whole command | processor time |"
    yield f"|--:|{'--:|' * (len(phases) + 3)}"
    for run, trial in enumerate(trials):
        phase_s = trial.need().phase_s
        parts = " | ".join(f"{phase_s[phase]:.1f}" for phase in phases)
        yield f"| {run + 1} | {parts} | {_warmup_s(trial):.1f} | {trial.wall_s:.1f} | {trial.cpu_s:.1f} |"
    yield ""
    middle_s = statistics.median(_warmup_s(trial) for trial in trials)
    yield f"Warm-up, median of {runs}: {middle_s:.1f} s (aim: under 60 s)."
    yield "The whole command also contains the launchers' imports, rendezvous, search and screen."


def _warmup_s(trial: Trial) -> float:
    return sum(trial.need().phase_s.values())


def rounds(*, runs: int) -> Iterator[str]:
    """Measure the number of rounds for the links of two to nine hosts."""
    yield "Fewest: a host has one partner in a round, so N hosts need N - 1 rounds, or N if N is odd."
    yield ""
    yield "| hosts | rounds | fewest | rounds again | links s | off by 10 % |"
    yield "|--:|--:|--:|--:|--:|--:|"
    for num_hosts in range(2, 2 + min(runs, 8)):
        made: Topology = healthy("uniform", num_hosts, rate_mbit=USUAL_MBIT)
        with Lab(made) as lab:
            measured: Measurements = warm_up(lab, "trial").need()
        survey = measured.survey
        used, again = (survey.rounds, survey.rounds_again) if survey else ("?", "?")
        fewest = num_hosts - 1 + num_hosts % 2
        beyond = len(outside(compared(made, measured), TOLERANCE))
        yield f"| {num_hosts} | {used} | {fewest} | {again} | {measured.phase_s['links']:.1f} | {beyond} |"
