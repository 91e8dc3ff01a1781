"""Peaks of pipeline stages: in the real job of all ranks, and played by one process without the other ranks.

As a program, this file prints the peaks of the layout of the test as one line of JSON.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.facts import Cell, Job, Layout
from pipette_launch.megatron.read import read_job
from pipette_launch.megatron.script import played_arguments

ROOT = Path(__file__).parents[2]
METERED = Path(__file__).with_name("metered_script.py")
RELEASE = "0.16.1"
FIRST_STEP = 2
"""First training step of the real job that counts. The optimizer's states exist from the end of step 1 on."""
EXAMPLE = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--vocab-size 1000 --transformer-impl local --lr 1e-4 --train-iters 3 --eval-iters 0 --micro-batch-size 2 "
    "--global-batch-size 16 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout of a model."""

    words: tuple[str, ...]
    world_size: int

    @functools.cached_property
    def job(self) -> Job:
        """The job as our reader reads it. On a CPU, the reader would refuse sequence parallelism."""
        return read_job(
            self.words, world_size=self.world_size, megatron_version=RELEASE, device_kind="cuda", for_prediction=True
        )

    def pp_ranks(self) -> list[int]:
        """Return the stages that are played: first, middle, last."""
        pp = self.job.own.pp
        return sorted({0, pp // 2, pp - 1})


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peak bytes of one rank."""

    real: int
    played: int
    formula: int

    @property
    def difference(self) -> float:
        """Played peak minus real peak, as a fraction of the real peak."""
        return self.played / self.real - 1


def compared(case: Case, script: Path, *, mocks_data: bool, timeout_s: float) -> dict[int, Peaks]:
    """Return the peaks of the first rank of each stage, by pipeline rank.

    `workload.load` must have run in this process.
    """
    from pipette_patches.play import run_script
    from pipette_patches.run import Program
    from pipette_patches.whole_stage import run_stage

    def arguments(job: Job, layout: Layout) -> tuple[str, ...]:
        return played_arguments(case.words, job=job, layout=layout, mocks_data=mocks_data, single_layers=False)

    def program(job: Job, layout: Layout) -> functools.partial[None]:
        words = arguments(job, layout)
        return functools.partial(run_script, Program(patches=(), name=str(script), is_module=False, arguments=words))

    job, layout = case.job, case.job.own
    real = _real_peaks(script, arguments(job, layout), layout.world_size, timeout_s=timeout_s)
    formula = peak_memory_bytes(job, layout)
    return {
        pp_rank: Peaks(
            real=real[layout.rank_of(Cell(pp=pp_rank, dp=0, cp=0, tp=0))],
            played=run_stage(job, layout, pp_rank, device_kind="cpu", program=program).tally_bytes,
            formula=int(formula[pp_rank].total),
        )
        for pp_rank in case.pp_ranks()
    }


def _real_peaks(script: Path, arguments: tuple[str, ...], world_size: int, *, timeout_s: float) -> dict[int, int]:
    """Train all ranks of a job over gloo, and return the peak bytes of each rank."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}")
    patched = ("-m", "pipette_patches.run", "--patch", "cpu_backend", "--", str(METERED), str(FIRST_STEP))
    folders = (str(script.parent), str(ROOT), str(ROOT / "patches"), os.environ.get("PYTHONPATH", ""))
    done = subprocess.run(
        [sys.executable, *torchrun, *patched, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rank"')]
    assert len(found) == world_size, f"{' '.join(arguments)}: {done.stderr[-8000:]}"
    return {each["rank"]: each["peak"] for each in found}


def main() -> None:
    """Compare the layout of the test."""
    from pipette_patches.workload import load

    load("cpu")
    out, sys.stdout = sys.stdout, sys.stderr
    case = Case(words=tuple(EXAMPLE.split()), world_size=2)
    found = compared(case, ROOT / "examples" / "pretrain_gpt.py", mocks_data=False, timeout_s=100)
    out.write(json.dumps({pp_rank: asdict(peaks) for pp_rank, peaks in found.items()}) + "\n")
    # At its end Python writes out the buffer of `sys.stdout` only.
    out.flush()


if __name__ == "__main__":
    main()
