"""The warm-up measures the job's own script, and a script that cannot be measured trains all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end.jobs import MODEL, ROOT, TRAINER, Done, finish, pipette, start, warm_pipette

from pipette_launch.facts import Measurements, files

CHECKOUT = os.environ.get("MEGATRON_LM_DIR", "")
pytestmark = [pytest.mark.timeout(300), pytest.mark.processes]
EXITS_IF_PLAYED = f"""
import os, runpy, sys
if os.environ["MASTER_PORT"] == "1":
    sys.exit(3)
sys.path.insert(0, {str(TRAINER.parent)!r})
runpy.run_path({str(TRAINER)!r}, run_name="__main__")
"""
TRAINING = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 5 --log-interval 1 --lr 1e-3 --tokenizer-type NullTokenizer "
    "--vocab-size 255 --split 90,5,5 --eval-iters 1 --eval-interval 100 --attention-dropout 0 --hidden-dropout 0 "
)
GPT = "pretrain_gpt.py --num-layers 4 --transformer-impl local"
NEW_HYBRID = "pretrain_hybrid.py --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
OLD_HYBRID = (
    "pretrain_mamba.py --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --is-hybrid-model "
    "--num-layers 4"
)
HAS_NEW_SCRIPT = (Path(CHECKOUT) / "pretrain_hybrid.py").is_file()
HYBRID = f"{NEW_HYBRID} --hybrid-layer-pattern" if HAS_NEW_SCRIPT else f"{OLD_HYBRID} --hybrid-override-pattern"
OWN_LAYER = """
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
layer = get_gpt_layer_local_spec()
"""
# A gated delta net runs only on a GPU, so attention takes its place.
OWN_STACK = """
from dataclasses import replace
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as spec
stack = replace(spec, submodules=replace(spec.submodules, gdn_layer=spec.submodules.attention_layer))
"""
DATA = (
    "--tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt --vocab-extra-ids 10 "
    "--data-cache-path index --legacy-tokenizer --transformer-impl local --micro-batch-size 2"
)
IMAGES = (
    "--img-h 28 --img-w 28 --patch-dim 14 --dataloader-seq-length 32 --decoder-seq-length 128 --ckpt-format torch "
    "--max-position-embeddings 128 --transformer-impl local"
) + ("" if HAS_NEW_SCRIPT else " --legacy-tokenizer")
WRITES_DATA = """
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(120))]
open("vocab.txt", "w").write("\\n".join(names))
data = IndexedDatasetBuilder("text.bin")
for document in range(60):
    data.add_document(torch.randint(5, len(names), (240,)), [20] * 12)
data.finalize("text.idx")
"""
PARTS = {
    GPT: {"layer", "core_attention"},
    f"{GPT} --spec own_layers layer": {"layer", "core_attention"},
    f"{HYBRID} *-*E --mamba-num-groups 1 --num-experts 4 --disable-bias-linear": {
        *("attention_layer", "mlp_layer", "expert_layer", "core_attention")
    },
    "pretrain_hybrid.py --spec own_stack stack --mamba-num-groups 1 --hybrid-layer-pattern G-+-": {
        *("delta_layer", "mlp_layer", "latent_layer", "core_attention")
    },
    f"pretrain_bert.py {DATA} --num-layers 4 --spec local": {"layer", "core_attention"},
    f"pretrain_t5.py {DATA} --encoder-num-layers 4 --decoder-num-layers 2 --decoder-seq-length 32": {
        *("layer", "core_attention")
    },
    f"pretrain_vlm.py {IMAGES} --encoder-num-layers 2 --decoder-num-layers 4": {"layer", "core_attention"},
}
"""Measured parts of jobs with NVIDIA's own scripts, beside embedding and head."""


def trained(folder: Path, script: Path) -> Done:
    """Run a job for two iterations."""
    done = warm_pipette(folder, "--nproc-per-node=2", "--pipette-budget=3", script, *MODEL, "--train-iters", "2")
    assert 0 == done.code, done.err
    assert [1, 2] == [iteration for iteration, _ in done.losses]
    return done


def test_layers_are_those_of_the_script(tmp_path: Path) -> None:
    """The example calls megatron-core's schedule itself, and its layers and stages are measured."""
    trained(tmp_path, TRAINER)

    found = files.read(next(tmp_path.glob("cache/pipette-launch/*/cluster.json")), Measurements)
    assert {"layer", "embedding", "head", "core_attention"} == {time.part for time in found.compute}


def test_a_script_that_exits_is_not_planned_and_trains(tmp_path: Path) -> None:
    """The screen has the reason in one sentence."""
    script = tmp_path / "train.py"
    script.write_text(EXITS_IF_PLAYED)

    done = trained(tmp_path, script)

    assert "no slot could measure a layer: the script refuses tp1 cp1 mbs1: the script exits with 3" in done.err
    assert done.err.count("exits with 3") == 1


@pytest.mark.skipif(not CHECKOUT, reason="needs a checkout of Megatron-LM, named by MEGATRON_LM_DIR")
@pytest.mark.parametrize("job", PARTS, ids=[f"{number}-{job.split()[0]}" for number, job in enumerate(PARTS)])
def test_nvidias_script_is_measured_and_learns_what_it_learns_under_torchrun(job: str, tmp_path: Path) -> None:
    """Its layers are timed by kind, and losses are the same to the last digit under the user's layout."""
    script, *words = job.split()
    if not (Path(CHECKOUT) / script).is_file():
        pytest.skip(f"this release has no {script}")
    (tmp_path / "own_layers.py").write_text(OWN_LAYER)
    (tmp_path / "own_stack.py").write_text(OWN_STACK)
    path = f"{ROOT}:{ROOT / 'patches'}:{tmp_path}"
    source = "--mock-data"
    if DATA in job:
        source = "--data-path=text"
        env = {**os.environ, "PYTHONPATH": CHECKOUT, "PYTHONWARNINGS": "ignore"}
        subprocess.run([sys.executable, "-c", WRITES_DATA], cwd=tmp_path, env=env, check=True, timeout=100)
    program = (Path(CHECKOUT) / script, *TRAINING.split(), *words, source)
    patched = ("--standalone", "--nproc-per-node=2", "-m", "pipette_patches.run", "--patch", "cpu_backend", "--")

    stock = finish(start(tmp_path, (*patched, *program), launcher="torch.distributed.run", PYTHONPATH=path))
    ours = pipette(tmp_path, "--nproc-per-node=2", "--pipette-budget=5", "--pipette-fix=all", *program, PYTHONPATH=path)

    assert (0, 0) == (stock.code, ours.code), stock.err[-2000:] + ours.err
    assert 5 == len(stock.losses)
    assert stock.losses == ours.losses
    found = files.read(next(tmp_path.glob("cache/pipette-launch/*/cluster.json")), Measurements)
    assert {"embedding", "head", *PARTS[job]} == {time.part for time in found.compute}
