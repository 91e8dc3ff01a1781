"""Megatron-Bridge itself accepts the overrides of a plan, and then has the layout of the plan."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
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


RECIPES = {
    "GPT-3 175B": "recipes.gpt.gpt3_175b:gpt3_175b_pretrain_config",
    "Qwen3 30B-A3B": "recipes.qwen.h100.qwen3_moe:qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config",
    "DeepSeek-V3": "recipes.deepseek.h100.deepseek_v3:deepseek_v3_pretrain_1024gpu_h100_bf16_config",
    "Nemotron 3 Nano": "recipes.nemotronh.h100.nemotron_3_nano:nemotron_3_nano_pretrain_8gpu_h100_bf16_config",
    "Nemotron 3.5": "perf_recipes.nemotronh.h100.nemotronh:nemotron_3_5_lightning_pretrain_16gpu_h100_bf16_config",
}
"""Recipes of dense layers, experts, latent attention, Mamba layers, and Mamba layers with multi-token prediction."""


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Return a function that makes the configuration of a recipe, with stand-ins for absent packages and for a GPU."""
    sys.path.insert(0, str(Path(__file__).parent))
    from absent import install
    from hub import write_hub

    from pipette_patches import without_transformer_engine

    hub, patch = tmp_path_factory.mktemp("hub"), pytest.MonkeyPatch()
    write_hub(hub)
    patch.setenv("HF_HUB_CACHE", str(hub))
    patch.setenv("HF_HUB_OFFLINE", "1")
    install()
    if find_spec("transformer_engine") is None:
        without_transformer_engine.install()
    # Bridge checks that the GPU suits the dispatcher of tokens.
    device = SimpleNamespace(major=9, minor=0, name="NVIDIA H100 80GB HBM3")
    patch.setattr("torch.cuda.get_device_properties", lambda *_: device)

    def make(name: str) -> Any:
        module, _, function = RECIPES[name].partition(":")
        return getattr(import_module(f"megatron.bridge.{module}"), function)()

    yield make
    patch.undo()


def job_of(config: Path, *words: str) -> tuple[Any, Job]:
    """Read the dialect and the job of a saved configuration."""
    dialect = dialect_of(words, script="x.py", world_size=WORLD_SIZE, saved=config)
    words = dialect.flags("0.19.0")
    options = {"for_planning": True, "is_translated": True}
    job = read_job(words, world_size=WORLD_SIZE, megatron_version="0.19.0", device_kind="cuda", **options)
    return dialect, job


def applied(config: Any, words: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Let Bridge apply and check overrides. Return the jobs of the configuration before and after the check."""
    from megatron.bridge.training.config import runtime_config_update
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    config = process_config_with_overrides(config, cli_overrides=list(words))
    config.to_yaml(str(folder / "before.yaml"))
    monkeypatch.setenv("WORLD_SIZE", str(WORLD_SIZE))
    monkeypatch.setenv("RANK", "0")
    runtime_config_update(config)
    config.to_yaml(str(folder / "after.yaml"))
    return [job_of(folder / name)[1] for name in ("before.yaml", "after.yaml")]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("GPT-3 175B", {"tp": 8, "etp": 8, "pp": 4, "dp": 16, "vpp": 24, "micro_batch_size": 4}),
        (
            "GPT-3 175B",
            {"tp": 1, "etp": 1, "pp": 16, "dp": 32, "vpp": 1, "sequence_parallel": False, "recompute": FULL},
        ),
        (
            "GPT-3 175B",
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
        ),
        ("GPT-3 175B", {"pp": 4, "dp": 32, "vpp": 1, "layers_per_chunk": (23, 24, 24, 25)}),
        ("Qwen3 30B-A3B", {"pp": 4, "cp": 2, "dp": 16, "ep": 8, "etp": 2, "vpp": 3}),
        ("Nemotron 3 Nano", {"tp": 2, "pp": 2, "dp": 128, "vpp": 4, "layers_per_chunk": (7,) * 6 + (5, 5)}),
    ],
)
def test_bridge_reads_the_written_layout(
    recipes: Any, name: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bridge applies the overrides, accepts the configuration, and has the layout and the padded vocabulary."""
    recipes(name).to_yaml(str(tmp_path / "own.yaml"))
    mine, job = job_of(tmp_path / "own.yaml")
    layout = replace(job.own, **changes)
    for found in applied(recipes(name), mine.written(job, layout), tmp_path, monkeypatch):
        assert found.own == layout
        assert found.model.padded_vocab_size(layout.tp) == job.model.padded_vocab_size(job.own.tp)


@pytest.mark.parametrize("name", RECIPES)
def test_bridge_accepts_plans(recipes: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pipette plan` reads a saved recipe and writes overrides, by which Bridge has each layout of the ranked list."""
    recipes(name).to_yaml(str(tmp_path / "own.yaml"))
    options = {"gpu": "h100-sxm", "nodes": WORLD_SIZE // 8, "budget_s": 3, "megatron_version": "0.19.0"}
    found = plan((), **options, bridge_config=tmp_path / "own.yaml")
    assert found.ranked
    for one in found.ranked[:3]:
        for job in applied(recipes(name), one.new_arguments, tmp_path, monkeypatch):
            assert job.own == one.layout


def test_the_script_itself_gives_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script with Bridge's recipe and `pretrain` gives the job with the overrides of its command line."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    words = ("model.tensor_model_parallel_size=8",)
    found = dialect_of(words, script=str(tmp_path / "train.py"), world_size=WORLD_SIZE)
    assert found.words == words
    assert "--tensor-model-parallel-size=8" in found.flags("0.19.0")
    assert "--num-layers=96" in found.flags("0.19.0")
