"""Words that Megatron does not take are answered with their cause, all of one kind in one sentence."""

from __future__ import annotations

import string
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_lines import SMALL, job

from pipette_launch.errors import MegatronError
from pipette_launch.megatron import read_job
from pipette_launch.megatron.flags import Arguments, flag_table
from pipette_launch.megatron.unknown_words import unknown_note

Purpose = Literal["for_prediction", "for_planning"]
FLAGS = sorted(option for option in flag_table("0.16.1") if option.startswith("--") and "_" not in option)


def complaint(words: str, *, base: list[str] | None = None, purpose: Purpose = "for_prediction") -> str:
    """The error of a command line that is predicted or planned."""
    with pytest.raises(MegatronError) as error:
        job(words, base=SMALL if base is None else base, **{purpose: True})  # type: ignore[arg-type]
    return str(error.value)


@pytest.mark.parametrize("purpose", ["for_prediction", "for_planning"])
@pytest.mark.parametrize(
    ("words", "pairs"),
    [
        (
            "--num_layers 32 --tensor_model_parallel_size 4 --sequence_parallel true",
            (
                "--num-layers for --num_layers, --tensor-model-parallel-size for --tensor_model_parallel_size, "
                "--sequence-parallel for --sequence_parallel"
            ),
        ),
        ("--micro_batch_size=4 --mine", "--micro-batch-size for --micro_batch_size"),
        ("--numLayers 32 --Hidden-Size 64", "--num-layers for --numLayers, --hidden-size for --Hidden-Size"),
        ("-num-layers 32 -lr 1", "--num-layers for -num-layers, --lr for -lr"),
        ("\N{EM DASH}num-layers 32", "--num-layers for \N{EM DASH}num-layers"),
        ("\N{EN DASH}\N{EN DASH}bf16", "--bf16 for \N{EN DASH}\N{EN DASH}bf16"),
    ],
)
def test_another_spelling_is_named(words: str, pairs: str, purpose: Purpose) -> None:
    """Its value would be left out, whether or not something is missing."""
    said = f"Megatron's flags have plain dashes, not underscores or capitals: write {pairs}"

    assert said == complaint(words, purpose=purpose) == complaint(words, base=[], purpose=purpose)


@given(st.sampled_from(FLAGS), st.sampled_from([str.title, str.lower]))
def test_every_flag_is_known_by_its_letters(flag: str, case: type[str]) -> None:
    """Underscores in the place of dashes, in any case, lead to the same letters in Megatron's own spelling."""
    word = "--" + case(flag[2:]).replace("-", "_")
    if word in FLAGS:
        return
    right = complaint(word, base=[]).partition(": write ")[2].removesuffix(f" for {word}")

    assert flag.strip(string.punctuation).replace("-", "") == right.replace("-", "").replace("_", "").lower()


@pytest.mark.parametrize(
    ("words", "pairs"),
    [
        (
            "model.num_layers=32 model.tensor_model_parallel_size=4",
            (
                "--num-layers 32 for model.num_layers=32, "
                "--tensor-model-parallel-size 4 for model.tensor_model_parallel_size=4"
            ),
        ),
        ("--bf16 ++train.train_iters=10", "--train-iters 10 for ++train.train_iters=10"),
        ("--bf16 num_layers=8", "--num-layers 8 for num_layers=8"),
    ],
)
def test_overrides_are_no_flags(words: str, pairs: str) -> None:
    """Megatron-Bridge, NeMo and Hydra write values so."""
    assert f"Megatron-LM takes its values as flags, not as NAME=VALUE: write {pairs}" == complaint(words)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("--recipe llama3_8b", "--recipe llama3_8b names a recipe of another program"),
        ("--recipe=llama3_8b model.seq_length=4096", "--recipe llama3_8b names a recipe of another program"),
        (
            "--recipe qwen3_1p7b --seq_length 4096 --hf_path Qwen/Qwen3-1.7B train.train_iters=9",
            "--recipe qwen3_1p7b names a recipe of another program",
        ),
        ("train pretrain --config a.yaml --train_iters 5", "--config a.yaml names a recipe of another program"),
        ("--model_recipe_name llama3_8b -tp 4", "--model_recipe_name llama3_8b names a recipe of another program"),
        ("--config-name conf", "--config-name conf names a recipe of another program"),
        ("--exp a.yaml", "--exp a.yaml names a recipe of another program"),
        ("conf.yaml", "conf.yaml belongs to a recipe or file"),
        ("model.foo=3", "model.foo=3 belongs to a recipe"),
        ("--model Qwen/Qwen2.5-7B", "--model Qwen/Qwen2.5-7B names a model, and its shape is read from flags alone"),
        ("--hf-path some/name", "--hf-path some/name names a model, and its shape is read from flags alone"),
        (
            "--num-layer 3 --hidden-sizes 4",
            "only Megatron's own spelling is read: --num-layers for --num-layer, --hidden-size for --hidden-sizes",
        ),
        ("--model=Qwen/Qwen3-8B --seq-lenght 5", "--model Qwen/Qwen3-8B names a model"),
        ("@args.txt", "@args.txt belongs to a recipe or file"),
        ("--mine 3", "add what is missing to the script's arguments"),
    ],
)
def test_missing_flags_have_a_cause(words: str, cause: str) -> None:
    """One sentence names what is missing and where it likely stands."""
    said = complaint(words, base=[])

    assert said.startswith("the command line lacks --num-layers, --hidden-size, --num-attention-heads, --seq-length")
    assert f"; {cause}" in said
    with pytest.raises(MegatronError, match="the command line lacks --num-layers"):
        job(words, base=[])


def test_a_launched_script_keeps_its_spelling() -> None:
    """The sentence names the spelling that is read; the script may not take that one."""
    with pytest.raises(MegatronError, match=r"only Megatron's own spelling is read: --num-layers for --num_layers$"):
        job("--num_layers 3", base=[])


@pytest.mark.parametrize("word", ["true", "False", "0", "off"])
def test_switches_take_no_value(word: str) -> None:
    """A word behind one would be ignored, where it may have been meant to turn it off."""
    said = f"Megatron's switches take no value: write --bf16 alone, or leave it out, for --bf16 {word}"

    assert said == complaint(f"--bf16 {word}")
    assert "write --micro-batch-size for --micro_batch_size" in complaint(f"--bf16 {word} --micro_batch_size 4")


@pytest.mark.parametrize("words", [["--num-layers 32 --hidden-size 64"], ["\n --num-layers 32\n --hidden-size 64\n"]])
def test_a_shell_that_splits_nothing_is_named(words: list[str]) -> None:
    """Zsh passes a variable with all flags as one word, and so does a shell where it is quoted."""
    with pytest.raises(MegatronError, match="several flags stand in one word, as zsh passes"):
        job(base=words, for_prediction=True)


@pytest.mark.parametrize("words", ["--mine a=3 --your num_layers=3", "--mine true", "--mine 1 --fp16", "--lr=1e-4"])
def test_values_of_other_flags_are_theirs(words: str) -> None:
    """The words behind a flag that Megatron does not have are the script's own."""
    assert job(words, for_prediction=True).own == job().own


def test_a_launched_script_judges_its_own_words() -> None:
    """It may have flags of its own that differ from Megatron's in their spelling alone."""
    words = [*SMALL, *"--micro_batch_size 4 --bf16 true --mine".split()]
    for is_other_size in (False, True):
        read = read_job(
            words,
            world_size=8,
            megatron_version="0.16.1",
            device_kind="cuda",
            for_planning=is_other_size,
            is_launched=True,
        )
        assert (job().own, ()) == (read.own, read.notes)


@pytest.mark.parametrize("word", ["--tp", "-tp", "--TP", "--tp_size", "--tp-size", "-tp=4"])
def test_a_short_name_is_no_flag_in_any_spelling(word: str) -> None:
    """Torch's and other trainers' names of sizes are named with Megatron's own, as they change nothing."""
    (note,) = unknown_note(Arguments.parse([word, "4"], "0.16.1"))

    name = word.partition("=")[0]
    assert f"without effect here: {name} (did you mean --tensor-model-parallel-size?)" in note


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([" --bf16"], ":  --bf16 (did you mean --bf16?);"),
        (["-v", "--mine"], ": -v, --mine;"),
        (["train", "4", "-1", "-0.5", "--"], ""),
    ],
)
def test_words_that_begin_with_a_dash_are_named(words: list[str], expected: str) -> None:
    """Numbers and other words may be values of a script's own flags."""
    notes = unknown_note(Arguments.parse(words, "0.16.1"))

    begins = f"not flags of Megatron 0.16.1, so without effect here{expected}"
    assert [begins] * bool(expected) == [note[: len(begins)] for note in notes]
