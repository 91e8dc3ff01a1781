"""Layouts that NVIDIA published ran, so our memory should let them run."""

from __future__ import annotations

from benchmarks import make_recipes
from benchmarks.bench_model_cards import cards
from benchmarks.bench_published_fits import GROUPS, predictions
from benchmarks.make_recipes import Recipe, Record


def test_at_least_97_percent_of_published_layouts_fit() -> None:
    """Llama 3.1 405B in FP8 on 256 GB200 is among them, and at most one of all is called too large."""
    priced = [one for one in predictions() if one.group in GROUPS[:2] and not one.refused]

    assert len(priced) >= 170
    assert sum(one.verdict == "fits" for one in priced) >= 0.97 * len(priced)
    assert 1 >= sum(one.verdict == "too large" for one in priced)
    assert ["fits"] == [one.verdict for one in priced if one.name.startswith("LLAMA3.1-405B, 256 GB200, FP8-CS")]


def test_at_most_three_models_with_a_card_are_refused() -> None:
    """Only models for whose layers Megatron-LM has no flags are refused, and the layouts of all others fit."""
    found = list(cards())

    assert len(found) == 23
    assert ["deepseek-v4-flash", "gemma-4-26b-a4b-it", "kimi-k3"] == [card.name for card in found if card.refused]
    assert [card.name for card in found if card.memory and not card.memory.fits] == []


def test_settings_of_a_recipe_become_flags() -> None:
    """Names change where Bridge names a setting differently, and settings without effect leave no flag."""
    model = Record(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout=[["embedding", "decoder"], ["decoder"], ["decoder"], ["mtp", "loss"]],
        recompute_modules=["mlp"],
        cpu_offloading_num_layers=3,
        moe_flex_dispatcher_backend="deepep",
    )
    recipe = Recipe(model=model, mixed_precision=Record(bf16=True, fp8="hybrid", fp8_recipe="tensorwise"))

    assert {
        "--bf16",
        "--cross-entropy-loss-fusion",
        "--fp8-format hybrid",
        "--fp8-recipe tensorwise",
        "--no-check-for-nan-in-loss-and-grad",
        "--pipeline-model-parallel-layout E(t|)*3mL",
        "--pipeline-model-parallel-size 2",
    } == {f"--{flag.strip()}" for flag in " ".join(make_recipes.flags_of(recipe)).split("--")[1:]}
