"""The warm-up measures the job's own script, and a script that cannot be measured trains all the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from end_to_end.jobs import MODEL, TRAINER, Done, pipette, torchrun

from pipette_launch.facts import Measurements, files

CHECKOUT = os.environ.get("MEGATRON_LM_DIR", "")
pytestmark = [pytest.mark.timeout(300), pytest.mark.processes]
WITHOUT_SCRIPT = "layers were built from the job's flags"
EXITS_IF_PLAYED = f"""
import os, runpy, sys
if os.environ["MASTER_PORT"] == "1":
    sys.exit(3)
sys.path.insert(0, {str(TRAINER.parent)!r})
runpy.run_path({str(TRAINER)!r}, run_name="__main__")
"""
HYBRID = (
    "--num-layers 4 --hybrid-override-pattern *-*- --is-hybrid-model --mamba-num-groups 1 "
    "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 4 "
    "--log-interval 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --split 90,5,5 "
    "--eval-iters 1 --eval-interval 100 --attention-dropout 0 --hidden-dropout 0"
).split()


def measured(folder: Path, script: Path, *words: str) -> tuple[Done, Measurements]:
    """Run a job for two iterations, and return its measurements."""
    done = pipette(folder, "--nproc-per-node=2", "--pipette-budget=3", *words, script, *MODEL, "--train-iters", "2")
    assert 0 == done.code, done.err
    return done, files.read(next(folder.glob("cache/pipette-launch/*/cluster.json")), Measurements)


def test_layers_are_those_of_the_script(tmp_path: Path) -> None:
    """The example calls megatron-core's schedule itself, and its layers and stages are measured."""
    done, found = measured(tmp_path, TRAINER)

    assert [1, 2] == [iteration for iteration, _ in done.losses]
    assert not [note for note in found.notes if WITHOUT_SCRIPT in note]
    assert {"layer", "embedding", "head", "core_attention"} == {time.part for time in found.compute}


def test_a_script_that_exits_is_measured_by_its_flags_and_trains(tmp_path: Path) -> None:
    """The plan has the reason."""
    script = tmp_path / "train.py"
    script.write_text(EXITS_IF_PLAYED)

    done, found = measured(tmp_path, script)

    assert [1, 2] == [iteration for iteration, _ in done.losses]
    (note,) = (note for note in found.notes if WITHOUT_SCRIPT in note)
    assert note.endswith("the script exits with 3 before its first training step")


@pytest.mark.skipif(not CHECKOUT, reason="needs a checkout of Megatron-LM, named by MEGATRON_LM_DIR")
def test_nvidias_hybrid_script_is_measured_and_learns_what_it_learns_under_torchrun(tmp_path: Path) -> None:
    """Attention and MLP layers are timed by kind, and losses are the same to the last digit under the user's layout."""
    script = Path(CHECKOUT) / "pretrain_mamba.py"
    wrapper = ("-m", "pipette_patches.run", "--patch", "cpu_backend", "--")

    stock = torchrun(tmp_path, "--standalone", "--nproc-per-node=2", *wrapper, script, *HYBRID)
    ours = pipette(tmp_path, "--nproc-per-node=2", "--pipette-budget=10", "--pipette-fix=all", script, *HYBRID)

    assert (0, 0) == (stock.code, ours.code), ours.err
    assert 4 == len(stock.losses)
    assert stock.losses == ours.losses
    found = files.read(next(tmp_path.glob("cache/pipette-launch/*/cluster.json")), Measurements)
    assert {"attention_layer", "mlp_layer"} < {time.part for time in found.compute}
