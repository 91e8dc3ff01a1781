"""The parts of the warm-up's benchmark: each runs real warm-ups and tells what came out, line by line of Markdown."""

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
"""Hosts, slots of each, whether links are as fast both ways, seed."""
CHECKS = 4
"""How often plain sockets may try to find the rates that were set, on a machine that others disturb."""
MOST_STOLEN = 0.02
"""Of the processor time: where more was taken, a warm-up is run once more, and both rows stand."""
ATTEMPTS = 3


def accuracy(*, runs: int) -> Iterator[str]:
    """Unequal links: how far every measured bandwidth is off, and whether links rank as they should."""
    rates = steps(LEAST_MBIT, MOST_MBIT, APART)
    yield f"Rates from {rates[0]:g} to {rates[-1]:g} Mbit/s, each {APART - 1:.0%} above the last, dealt out by a seed."
    yield "Equal rates are ties: their order does not count. Plain sockets met every rate within 10 % before each run,"
    yield f"in one of at most {CHECKS} checks. Stolen = processor time that other virtual machines took meanwhile;"
    yield f"above {MOST_STOLEN:.0%} the same case is run again, up to {ATTEMPTS} times, and all runs are shown."
    yield "Slots of one host share its wires, so each should get its part of the rate while all send."
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
    """Let plain sockets find the rates that were set; returns how many checks that took.

    Raises:
        LabError: none found them.

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
"""Hosts, network, faults. The usual rate is 400 Mbit/s; on two islands 800 within and 200 between.

Islands have three hosts: of two, the one link that is left does not say what is usual.
"""


def faults(*, runs: int) -> Iterator[str]:
    """Throttled links and slowed devices: whether each is found and named, and nothing else is."""
    yield "One slot on each host. Found = a verdict names that host's device, or that link in a slow direction."
    yield ""
    yield "| hosts | network | made wrong | found | false | what was said |"
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
    """Nothing is wrong: how many sick verdicts there are all the same."""
    yield f"{runs} warm-ups, four hosts of one slot; verdicts that call something sick are false alarms."
    yield ""
    yield "| run | network | sick | other verdicts | off by 10 % | worst | wall s | what was said |"
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
    """Eight hosts, one process each: how long a warm-up takes, by part."""
    made = healthy("uniform", 8, rate_mbit=USUAL_MBIT)
    with Lab(made) as lab:
        _checked(lab)
        trials = [warm_up(lab, f"trial{run}") for run in range(runs)]
    yield f"Eight hosts, one slot each, all links {USUAL_MBIT:g} Mbit/s; seconds, of each phase the slowest worker's."
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
    yield "The whole command adds the launchers' imports, rendezvous, search and screen."


def _warmup_s(trial: Trial) -> float:
    return sum(trial.need().phase_s.values())


def rounds(*, runs: int) -> Iterator[str]:
    """Two to nine hosts: how many rounds the links took."""
    yield "Fewest: a host has one partner in a round, so N hosts need N-1 rounds, or N where N is odd and one rests."
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
