"""Memory estimators of others on the golden data, in the same table as ours."""

from __future__ import annotations

from benchmarks.estimators import fujii, pipette_mlp
from benchmarks.estimators.megatron_formula import megatron_formula_bytes
from benchmarks.validation import golden
from benchmarks.validation.folds import folds
from benchmarks.validation.golden_score import Estimate, Scored, score_peak_only
from benchmarks.validation.lines import Found
from pipette_launch.facts import Job

MLP_FOLDS = 5
NOTES = (
    "Baselines predict the fullest stage, not the last one, and are scored as they are.",
    f"Pipette's MLP is trained on measured peaks, {MLP_FOLDS} times, each time without the families it then predicts.",
)


def megatron_formula(job: Job) -> Estimate:
    """Megatron's own theoretical memory."""
    return Estimate(static_bytes=None, peak_bytes=megatron_formula_bytes(job, job.own))


def fujii_estimate(job: Job) -> Estimate:
    """The 4D estimator of Fujii et al. 2024, which its authors use with a rule of 80 %."""
    return Estimate(static_bytes=None, peak_bytes=fujii.estimate_bytes(job, job.own))


ESTIMATORS = {"Megatron formula": megatron_formula, "Fujii 2024": fujii_estimate}


def run(data: golden.Golden, *, seed: int, epochs: int = pipette_mlp.EPOCHS) -> Found:
    """Score every baseline on the golden data."""
    found = Found()
    for name, estimator in ESTIMATORS.items():
        found += golden.run_baseline(data, name, estimator)
    return found + mlp(data, seed=seed, epochs=epochs)


def mlp(data: golden.Golden, *, seed: int, epochs: int) -> Found:
    """Pipette's neural estimator, trained with whole families of tests left out.

    On a file of its own the training rows are the development data's, less the families that the file shares.
    """
    given = [(item, family) for item, family in data.given if item.job is not None]
    known = [(item, family) for item, family in data.fit if item.job is not None]
    scored: list[Scored] = []
    for part in folds([family for _, family in given], MLP_FOLDS):
        left_out = {given[place][1] for place in part}
        training = [item for item, family in known if family not in left_out]
        if len(training) < 2:
            continue
        model = pipette_mlp.train(
            [pipette_mlp.features(item.job, item.job.own) for item in training if item.job],
            [item.layout.peak_bytes for item in training],
            seed=seed,
            epochs=epochs,
        )
        jobs = [item.job for place in part if (item := given[place][0]).job is not None]
        answers = model.predict([pipette_mlp.features(job, job.own) for job in jobs if job])
        scored += [
            Scored(
                read=given[place][0],
                family=given[place][1],
                estimate=Estimate(static_bytes=None, peak_bytes=float(answer)),
            )
            for place, answer in zip(part, answers, strict=True)
        ]
    return Found(lines=tuple(score_peak_only("Pipette's MLP", scored, {})))
