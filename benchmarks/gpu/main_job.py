"""The main job on one device: from nothing, from the cache, beside torchrun, with trials, and out of memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.gpu.jobs import COMMON_WORDS, FULL, LOCAL_WORDS, DeviceKind
from benchmarks.gpu.launches import GRACE_S, OURS, TORCHRUN, TRAINER, Launch, Run, losses_apart, newest_cached
from benchmarks.gpu.notebook import Notebook, Record, of_kind
from pipette_launch import megatron
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Choice, Layout, Measurements, Plan, files
from pipette_launch.facts.outcome import Outcome
from pipette_launch.text import MIB, seconds_text

ITERATIONS = 24
"""A few more than an outcome rests on."""
PLANNED, OWN = "torchrun, the plan's flags", "torchrun, own flags"
"""Names of runs."""
TIGHT = Path(__file__).with_name("tight.py")
MODELS: dict[DeviceKind, str] = {
    # 1.0 billion parameters: 18 GB of weights, gradients and optimizer on one device.
    "cuda": "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --vocab-size 32000 --global-batch-size 8",
    "cpu": "--num-layers 2 --hidden-size 64 --ffn-hidden-size 176 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --vocab-size 256 --global-batch-size 8",
}
BUDGET_S = {"cuda": 40, "cpu": 30}
NEEDED_S = 20.0
"""Less time is not enough for one more run on a GPU."""
MOST_S = {"cuda": 150.0, "cpu": 400.0}
"""A run that takes longer hangs; the others may not."""
TRIALS = {"cuda": 2, "cpu": 1}
"""Plans that are tried besides the user's own."""
LEAST_SHARE = 0.5
"""Share of the wanted compute cases that a warm-up has to time: a plan over fewer rests on the device model."""
MARGIN_BYTES = {"cuda": 512 * MIB, "cpu": 40 * MIB}
"""Bytes left for libraries and threads beyond the prediction if memory is tight."""


@dataclass(kw_only=True)
class Job:
    """The runs of one job, whose cache they share."""

    book: Notebook
    folder: Path
    implementation: tuple[str, ...] = LOCAL_WORDS
    """Flags that choose who makes the layers."""

    @property
    def words(self) -> list[str]:
        """Words of the trainer."""
        kind = self.book.kind
        common = (*COMMON_WORDS[kind], *self.implementation, "--train-iters", str(ITERATIONS))
        return [*MODELS[kind].split(), *common]

    def plan(self) -> Plan:
        """The plan of the last launch that made one."""
        return newest_cached(self.folder, Plan, "plan.json")

    def run(
        self,
        flags: Sequence[object],
        *,
        words: Sequence[str] = (),
        script: Path = TRAINER,
        launcher: str = OURS,
        **env: str,
    ) -> Run:
        """Run it once under a launcher; raises PipetteError where it does not train to its end."""
        device = ["--pipette-device", self.book.kind] if launcher == OURS else []
        launch = Launch(
            words=["--nproc-per-node", 1, *device, *flags, script, *(words or self.words)],
            folder=self.folder,
            device=self.book.device,
            launcher=launcher,
            variables=env,
        )
        done = launch.finish(min(max(self.book.left_s() - GRACE_S, 1.0), MOST_S[self.book.kind]))
        if done.code != 0 or not done.iterations:
            raise done.failure(launcher)
        return done


def measure(book: Notebook) -> None:
    """Run the job in every way, the most telling first."""
    with tempfile.TemporaryDirectory() as name:
        job = Job(book=book, folder=Path(name))
        if not book.attempt("pipette-launch from nothing", partial(run_cold, job)):
            book.attempt("torchrun with the user's own flags", partial(run_torchrun, job, None))
            return
        plan = job.plan()
        book.attempt("torchrun with the plan's flags", partial(run_torchrun, job, plan), needs_s=NEEDED_S)
        book.attempt("pipette-launch from the cache", partial(_from_cache, job), needs_s=NEEDED_S)
        book.attempt("a plan that runs out of memory", partial(_out_of_memory, job, plan), needs_s=2 * NEEDED_S)
        if plan.chosen.layout != plan.own.layout:
            book.attempt("torchrun with the user's own flags", partial(run_torchrun, job, None), needs_s=NEEDED_S)
        book.attempt("trials", partial(_trials, job), needs_s=3 * NEEDED_S)


def run_cold(job: Job) -> None:
    """Measure, plan and train; keep predictions and results."""
    done = job.run(["--pipette-budget", BUDGET_S[job.book.kind]])
    _keep(job, "cold", done)
    cluster = newest_cached(job.folder, Measurements, "cluster.json")
    plan = job.plan()
    outcome = newest_cached(job.folder, Outcome, "outcome.json")
    job.book.add(
        "warm-up",
        phase_s=cluster.phase_s,
        cases=cluster.coverage().num_timed,
        wanted=cluster.coverage().num_wanted,
        stages=len(cluster.stages),
        overhead_bytes=cluster.overhead_bytes,
        notes=list(cluster.notes),
    )
    check_cases(job.book)
    job.book.add(
        "plan",
        chosen=plan.chosen.layout.words(),
        own=plan.own.layout.words(),
        predicted_s=plan.chosen.step_time_s,
        predicted_own_s=plan.own.step_time_s,
        candidates=[choice.layout.words() for choice in plan.candidates()],
        notes=list(plan.notes),
        solve_s=plan.solve_s,
    )
    job.book.add(
        "outcome",
        layout=outcome.layout.words(),
        predicted_s=outcome.predicted_step_s,
        measured_s=outcome.measured_step.median_s,
        spread=outcome.measured_step.spread,
        peaks=[
            {"source": peak.source, "predicted_bytes": peak.predicted_bytes, "measured_bytes": peak.measured_bytes}
            for peak in outcome.peaks
        ],
    )


def check_cases(book: Notebook) -> None:
    """Let the part fail if the warm-up timed less than half of its compute cases."""
    (one,) = of_kind(book.records, "warm-up")
    if one["cases"] < LEAST_SHARE * one["wanted"]:
        why = f"{one['cases']} of {one['wanted']} cases timed: the plan rests on the device model, not on measurements"
        book.fail("compute cases of the warm-up", why)


def run_torchrun(job: Job, plan: Plan | None) -> None:
    """The same under torchrun: by the flags that the plan writes, or by the user's own."""
    words = job.words
    if plan is not None:
        read = megatron.read_job(words, world_size=1, megatron_version="0.16.1", device_kind=job.book.kind)
        words = list(megatron.write_arguments(words, job=read, layout=plan.chosen.layout))
    done = job.run([], words=words, launcher=TORCHRUN)
    _keep(job, PLANNED if plan else OWN, done)


def _from_cache(job: Job) -> None:
    done = job.run([])
    if "measuring" in done.err:
        raise PipetteError("the second start measured again")
    _keep(job, "cached", done)


def _trials(job: Job) -> None:
    done = job.run(["--pipette-trials", TRIALS[job.book.kind], "--pipette-budget", BUDGET_S[job.book.kind]])
    said = [line for line in done.err.splitlines() if "trial" in line.lower()]
    _keep(job, "trials", done, said=said[:12])


def _out_of_memory(job: Job, plan: Plan) -> None:
    """Run a plan whose first choice needs more memory than is left, while what comes next needs less."""
    greedy, frugal = (_choice(job, plan, layout) for layout in (Layout(micro_batch_size=8), Layout(recompute=FULL)))
    chosen, least = greedy.memory.model_bytes[0], frugal.memory.model_bytes[0]
    left = (chosen + least) // 2 + MARGIN_BYTES[job.book.kind]
    path = job.folder / "plan.json"
    files.write(path, replace(plan, chosen=greedy, alternatives=(frugal,), keeps_own=False))
    done = job.run(["--pipette-plan", path], script=TIGHT, TIGHT_BYTES=str(left))
    said = [line for line in done.err.splitlines() if "out of memory" in line or "that plan cannot start" in line]
    said = [line for line in said if line.startswith("pipette-launch")]
    if not any("out of memory" in line for line in said) or not any("cannot start" in line for line in said):
        raise PipetteError(f"with {left / MIB:.0f} MiB left nothing gave way: {done.stderr_end}")
    _keep(job, "tight memory", done, said=said, left_bytes=left, chosen_bytes=chosen, least_bytes=least)


def _choice(job: Job, plan: Plan, layout: Layout) -> Choice:
    """A candidate by hand, as large as the closed form says."""
    read = megatron.read_job(job.words, world_size=1, megatron_version="0.16.1", device_kind=job.book.kind)
    peak = peak_memory_bytes(read, layout)[0].total
    memory = replace(plan.own.memory, need_bytes=(peak,), least_bytes=(peak,), model_bytes=(peak,))
    return replace(plan.own, layout=layout, memory=memory)


def _keep(job: Job, name: str, done: Run, **more: object) -> None:
    job.book.add(
        "run",
        name=name,
        seconds=done.seconds,
        first_iteration_s=done.first_iteration_s,
        steps_s=[one.step_time_s for one in done.iterations],
        losses=[one.loss or "" for one in done.iterations],
        most_bytes=done.most_bytes,
        **more,
    )


def lines(records: Sequence[Record]) -> Iterator[str]:
    """Compare predictions with results, then list every run."""
    yield from _foretold(records)
    runs = of_kind(records, "run")
    if runs:
        yield ""
        yield "| run | seconds | to the first iteration | step, median | losses as torchrun's | device held at most |"
        yield "|---|--:|--:|--:|---|--:|"
    by_name = {run["name"]: run for run in runs}
    # A plan of the user's own layout writes the user's own flags, so one run shows both.
    if (plans := of_kind(records, "plan")) and plans[0]["chosen"] == plans[0]["own"] and PLANNED in by_name:
        by_name.setdefault(OWN, by_name[PLANNED])
    for run in runs:
        first = run["first_iteration_s"]
        held = f"{run['most_bytes'] / MIB:,.0f} MiB" if run["most_bytes"] else "-"
        yield (
            f"| {run['name']} | {run['seconds']:.1f} | {f'{first:.1f}' if first else '-'} "
            f"| {seconds_text(step_s(run))} | {_same_losses(run, by_name)} | {held} |"
        )
    own, best = by_name.get(OWN), by_name.get("cold")
    if own and best:
        yield ""
        gain = step_s(own) / step_s(best)
        yield f"The plan's step is {gain:.2f} times as fast as that of the user's own flags under torchrun."
    for run in runs:
        if run.get("said"):
            yield ""
            yield f"What the launcher said ({run['name']}):"
            yield ""
            yield from (f"    {line}" for line in run["said"])


def _foretold(records: Sequence[Record]) -> Iterator[str]:
    for one in of_kind(records, "plan"):
        yield f"Chosen {one['chosen']}, the user's own is {one['own']}; {len(one['candidates'])} candidates."
    for one in of_kind(records, "outcome"):
        yield (
            f"Step: predicted {seconds_text(one['predicted_s'])}, measured {seconds_text(one['measured_s'])} "
            f"({one['predicted_s'] / one['measured_s'] - 1:+.1%}; spread {one['spread']:.1%})."
        )
        for peak in one["peaks"]:
            off = peak["predicted_bytes"] / peak["measured_bytes"] - 1
            yield (
                f"Peak by {peak['source']}: predicted {peak['predicted_bytes'] / MIB:,.0f} MiB, measured "
                f"{peak['measured_bytes'] / MIB:,.0f} MiB ({off:+.2%})."
            )
    for one in of_kind(records, "warm-up"):
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in one["phase_s"].items())
        yield (
            f"Warm-up: {one['cases']} of {one['wanted']} compute cases timed, {one['stages']} stages run; seconds by "
            f"phase: {phases}."
        )
        yield from (f"It noted: {note}" for note in one["notes"])


def step_s(run: Record) -> float:
    """The median step, the first five left out, which carry compilation and cold caches."""
    steps = sorted(run["steps_s"][5:] or run["steps_s"])
    return float(steps[len(steps) // 2])


def _same_losses(run: Record, by_name: dict[str, Record]) -> str:
    """Compare the losses with torchrun's under the same flags, digit by digit."""
    other = by_name.get(PLANNED if run["name"] in ("cold", "cached") else OWN)
    if other is None or other is run:
        return "-"
    pairs = list(zip(run["losses"], other["losses"], strict=False))
    same = sum(one == two for one, two in pairs)
    off = losses_apart(run["losses"], other["losses"])
    return f"{same} of {len(pairs)} to the digit" + (f", at most {off:.1e} apart" if off else "")
