"""Megatron-Bridge itself accepts the overrides of a plan, and then has the layout of the plan."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pipette_launch.facts import Job, Recompute
from pipette_launch.megatron import dialect_of, read_job
from pipette_launch.planning.plan import plan

try:
    HAS_BRIDGE = find_spec("megatron.bridge") is not None
except ModuleNotFoundError:
    HAS_BRIDGE = False
pytestmark = [
    pytest.mark.skipif(not HAS_BRIDGE, reason="needs megatron-bridge (Python 3.12): scripts/test-bridge"),
    pytest.mark.timeout(600),
]
WORLD_SIZE = 512
FULL = Recompute(granularity="full", method="uniform", num_layers=1)
SELECTIVE = Recompute(granularity="selective", modules=("core_attn", "mlp"))
SCRIPT = """
import sys
from absent import install
install()
from megatron.bridge.recipes.gpt.gpt3_175b import gpt3_175b_pretrain_config
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides
pretrain(process_config_with_overrides(gpt3_175b_pretrain_config(), cli_overrides=sys.argv[1:]), None)
"""


@pytest.fixture(scope="module")
def recipe() -> Any:
    """Return Bridge's recipe of GPT-3 175B, imported with stand-ins for absent packages."""
    sys.path.insert(0, str(Path(__file__).parent))
    from absent import install

    from pipette_patches.abstract import transformer_engine

    install()
    if find_spec("transformer_engine") is None:
        transformer_engine.install()
    from megatron.bridge.recipes.gpt.gpt3_175b import gpt3_175b_pretrain_config

    return gpt3_175b_pretrain_config


def job_of(config: Path, *words: str) -> tuple[Any, Job]:
    """Read the dialect and the job of a saved configuration."""
    dialect = dialect_of(words, script="x.py", world_size=WORLD_SIZE, saved=config)
    words = dialect.flags("0.19.0")
    job = read_job(words, world_size=WORLD_SIZE, megatron_version="0.19.0", device_kind="cuda", for_planning=True)
    return dialect, job


def applied(recipe: Any, words: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Let Bridge apply and check overrides. Return the jobs of the configuration before and after the check."""
    from megatron.bridge.training.config import runtime_config_update
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    config = process_config_with_overrides(recipe(), cli_overrides=list(words))
    config.to_yaml(str(folder / "before.yaml"))
    monkeypatch.setenv("WORLD_SIZE", str(WORLD_SIZE))
    monkeypatch.setenv("RANK", "0")
    runtime_config_update(config)
    config.to_yaml(str(folder / "after.yaml"))
    return [job_of(folder / name)[1] for name in ("before.yaml", "after.yaml")]


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": 8, "etp": 8, "pp": 4, "dp": 16, "vpp": 24, "micro_batch_size": 4},
        {"tp": 1, "etp": 1, "pp": 16, "dp": 32, "vpp": 1, "sequence_parallel": False, "recompute": FULL},
        {
            "tp": 2,
            "etp": 2,
            "pp": 16,
            "cp": 2,
            "dp": 8,
            "vpp": 1,
            "recompute": SELECTIVE,
            "overlap_param_gather": False,
        },
        {"pp": 4, "dp": 32, "vpp": 1, "layers_per_chunk": (23, 24, 24, 25)},
    ],
)
def test_bridge_reads_the_written_layout(
    recipe: Any, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bridge applies the overrides, accepts the configuration, and has the layout and the padded vocabulary."""
    recipe().to_yaml(str(tmp_path / "own.yaml"))
    mine, job = job_of(tmp_path / "own.yaml")
    layout = replace(job.own, **changes)
    for found in applied(recipe, mine.written(job, layout), tmp_path, monkeypatch):
        assert found.own == layout
        assert found.model.padded_vocab_size(layout.tp) == job.model.padded_vocab_size(job.own.tp)


def test_bridge_accepts_a_plan(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pipette plan` reads a saved recipe and writes overrides, by which Bridge has the chosen layout."""
    words = ("model.tensor_model_parallel_size=2", "model.virtual_pipeline_model_parallel_size=null")
    recipe().to_yaml(str(tmp_path / "own.yaml"))
    options = {"gpu": "h100-sxm", "nodes": WORLD_SIZE // 8, "budget_s": 5, "megatron_version": "0.19.0"}
    found = plan(words, **options, bridge_config=tmp_path / "own.yaml")
    assert not found.keeps_own
    assert found.setting is not None
    for job in applied(recipe, found.setting.new_arguments, tmp_path, monkeypatch):
        assert job.own == found.chosen.layout


def test_the_script_itself_gives_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script with Bridge's recipe and `pretrain` gives the job with the overrides of its command line."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    words = ("model.tensor_model_parallel_size=8",)
    found = dialect_of(words, script=str(tmp_path / "train.py"), world_size=WORLD_SIZE)
    assert found.words == words
    assert "--tensor-model-parallel-size=8" in found.flags("0.19.0")
    assert "--num-layers=96" in found.flags("0.19.0")
