"""Command lines are cut as argparse cuts them, and no word is lost."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, Literal, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_lines import SMALL, job

from pipette_launch.errors import MegatronError
from pipette_launch.megatron import read_job
from pipette_launch.megatron.flags import (
    Arguments,
    Flag,
    Token,
    flag_table,
    known_release,
    release_of,
    releases,
    tokenise,
    unknown_note,
    unread_words,
)

VERSION = "0.16.1"
OPTIONS = (
    "--num-layers",
    "--lr",
    "--bf16",
    "--disable-bias-linear",
    "--recompute-modules",
    "--data-path",
    "--rampup-batch-size",
    "--tokenizer-type",
    "--rl-partial-rollouts",
    "--no-rl-partial-rollouts",
    "--persistent-save-interval",
    "--save-interval",
)
WORDS = ("1", "-1", "-1.5", "-1e-5", "0.1", "core_attn", "a b", "-a b", "", "-", "-x", "--mine", "--mine=3")
words = st.lists(
    st.one_of(
        st.sampled_from(OPTIONS),
        st.sampled_from(WORDS),
        st.builds(lambda option, value: f"{option}={value}", st.sampled_from(OPTIONS), st.sampled_from(WORDS)),
    ),
    max_size=8,
)


class Refusal(Exception):  # noqa: N818 - what argparse says instead of leaving the process
    """The reference parser refused a command line."""


class Reference(argparse.ArgumentParser):
    """A parser like Megatron's, made from the table."""

    def __init__(self) -> None:
        super().__init__(allow_abbrev=False, add_help=False)
        table = flag_table(VERSION)
        for option in OPTIONS:
            self._add(table[option])

    def _add(self, flag: Flag) -> None:
        if flag.action == "boolean_optional":
            if not flag.option.startswith("--no-"):
                self.add_argument(
                    flag.option, dest=flag.dest, action=argparse.BooleanOptionalAction, default=flag.default
                )
        elif flag.nargs == 0:
            self.add_argument(flag.option, dest=flag.dest, action=flag.action)
        else:
            kind = {"int": int, "float": float}.get(flag.kind or "", str)
            values = {"nargs": flag.nargs, "type": kind, "choices": flag.choices}
            self.add_argument(flag.option, dest=flag.dest, default=flag.default, **values)

    def error(self, message: str) -> NoReturn:
        """Raise instead of ending the process."""
        raise Refusal(message)


REFERENCE = Reference()


def read(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return our values of the destinations above, and the words that belong to no flag."""
    arguments = Arguments.parse(argv, VERSION)
    dests = {flag_table(VERSION)[option].dest for option in OPTIONS}
    return {dest: arguments.get(dest) for dest in dests}, [
        word for token in arguments.tokens if token.flag is None for word in token.words
    ]


def refused(argv: list[str]) -> bool:
    """Return whether a command line is refused, or has values that only its script judges."""
    try:
        return bool(Arguments.parse(argv, VERSION).free_values)
    except MegatronError:
        return True


@settings(max_examples=200, deadline=None)
@given(words)
def test_tokens_agree_with_argparse(argv: list[str]) -> None:
    """Values, stray words and refusals equal argparse's without abbreviations, but for values that change no step."""
    try:
        namespace, stray = REFERENCE.parse_known_args(argv)
    except Refusal:
        assert refused(argv)
        return

    assert (vars(namespace), stray) == read(argv)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.sampled_from((*OPTIONS, *WORDS, "--")), st.text(max_size=6)), max_size=8))
def test_no_word_is_lost(argv: list[str]) -> None:
    """The tokens' words, joined, are the command line."""
    try:
        arguments = Arguments.parse(argv, VERSION)
    except MegatronError:
        return

    assert argv == list(arguments.words)


def test_list_flags_take_all_values_and_the_last_replaces() -> None:
    """Values run to the next flag, and a second list replaces the first."""
    arguments = Arguments.parse(
        ["--recompute-modules", "mlp", "moe", "--bf16", "--recompute-modules", "core_attn"], VERSION
    )

    assert ["core_attn"] == arguments.get("recompute_modules")


def test_nothing_after_two_dashes_is_a_flag() -> None:
    """A bare `--` ends the flags, and a new flag is put before it."""
    arguments = Arguments.parse(["--num-layers", "2", "--", "--num-layers", "3"], VERSION)

    assert 2 == arguments.get("num_layers")
    assert ("--num-layers", "2", "--bf16", "--", "--num-layers", "3") == arguments.with_flag("--bf16").words


def test_edits_leave_other_words_alone() -> None:
    """An edit replaces the last of several flags in place; a deletion removes all of them."""
    arguments = Arguments.parse(["--lr=1", "--mine", "x", "--lr", "2", "--bf16"], VERSION)

    assert ("--lr=1", "--mine", "x", "--lr", "3", "--bf16") == arguments.with_flag("--lr", "3").words
    assert ("--mine", "x", "--bf16") == arguments.without("lr").words


MISSING = "a value is missing; an unset variable of the shell leaves a flag without its value"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-layers"], f"--num-layers: {MISSING}"),
        (["--num-layers", "--bf16", "--recompute-modules"], f"--num-layers, --recompute-modules: {MISSING}"),
        (["--rampup-batch-size", "1", "2"], "--rampup-batch-size: expected 3 arguments"),
        (["--rampup-batch-size=1"], "--rampup-batch-size: expected 3 arguments"),
        (["--bf16=yes"], "--bf16: takes no value; write it alone, or leave it out"),
        (["--sequence-parallel=True"], "--sequence-parallel: takes no value; write it alone, or leave it out"),
        (["--num-layers", "many"], "--num-layers: invalid int value: 'many'"),
    ],
)
def test_malformed_flags_are_named(argv: list[str], message: str) -> None:
    """The error names a flag with a wrong number or kind of values, and the value found."""
    with pytest.raises(MegatronError) as error:
        Arguments.parse(argv, VERSION).get("num_layers")

    assert message == str(error.value)


@pytest.mark.parametrize(
    ("argv", "version", "message"),
    [
        (
            "--softmax-type linear",
            "0.16.1",
            "--softmax-type linear: unknown value 'linear'; known are vanilla, off-by-one",
        ),
        ("--position-embedding-type alibi", "0.16.1", "--position-embedding-type alibi: unknown value 'alibi'"),
        ("--moe-token-dispatcher-type alltoall_seq", "0.16.1", "unknown value 'alltoall_seq'"),
        ("--moe-router-load-balancing-type aux_loss even", "0.16.1", "unknown value 'even'"),
        ("--attention-backend xformers", "0.20", "unknown value 'xformers'"),
        ("--main-grads-dtype fp8", "0.18.0", "unknown value 'fp8'"),
        ("--empty-unused-memory-level 3", "0.19.0", "unknown value 3; known are 0, 1, 2"),
        ("--normalization rmsnorm", "0.16.1", "known are LayerNorm, RMSNorm; did you mean RMSNorm?"),
        ("--optimizer soap", "0.16.1", "known are adam, sgd, muon, dist_muon; Megatron 0.18 has it"),
        ("--optimizer ademamix", "0.16.1", "muon, dist_muon; no formula has its memory and time"),
    ],
)
def test_values_beside_the_choices_are_refused(argv: str, version: str, message: str) -> None:
    """A flag with choices refuses other values, and the error lists the choices."""
    with pytest.raises(MegatronError, match=message):
        Arguments.parse(argv.split(), version)


def test_values_that_change_no_step_are_listed_once() -> None:
    """A fork's own tokenizer, decay or checkpoint format does not stop a prediction; one note lists all of them."""
    words = "--tokenizer-type Llama3Tokenizer --lr-decay-style trapezoid --ckpt-format hf --timing-log-level 3"
    found = job(words, for_prediction=True)

    (note,) = [each for each in found.notes if each.startswith("not values of Megatron 0.16.1")]
    assert (
        "not values of Megatron 0.16.1, so without effect here: --tokenizer-type Llama3Tokenizer, --lr-decay-style "
        "trapezoid, --ckpt-format hf, --timing-log-level 3; the script stops at these values unless the script defines "
        "them"
    ) == note
    usual = job("--tokenizer-type TikTokenizer", for_prediction=True)
    assert replace(usual, notes=()) == replace(found, notes=())


def test_a_launched_script_judges_its_own_values() -> None:
    """A launched job with a fork's tokenizer is planned as with a known tokenizer, and gets no note."""
    words = [*SMALL, "--tokenizer-type", "Llama3Tokenizer"]
    read = read_job(words, world_size=8, megatron_version="0.16.1", device_kind="cuda", is_launched=True)

    assert job().own == read.own
    assert not [note for note in read.notes if "not values" in note]


def test_each_flag_with_choices_is_free_or_changes_a_step() -> None:
    """An unknown value is read over for flags whose effect is known to be small or outside a step, and no others."""
    choices = {flag.dest for release in releases() for flag in flag_table(release).values() if flag.choices}
    free = {flag.dest for release in releases() for flag in flag_table(release).values() if flag.is_free}

    assert {"lr_decay_style", "tokenizer_type", "ckpt_format", "timing_log_level", "rope_type"} <= choices & free
    assert (
        {"optimizer", "recompute_method", "moe_token_dispatcher_type", "fp8_recipe", "transformer_impl"}
        | {"main_grads_dtype", "empty_unused_memory_level", "normalization", "position_embedding_type"}
    ) <= choices - free


def test_all_faults_of_a_line_are_named_together() -> None:
    """Wrong values, refused kinds of jobs, contradictions and missing flags are numbered in one message."""
    words = (
        "--optimizer ademamix --num-layers many --hidden-size --bf16 --fp16 --recompute-method half "
        "--moe-token-dispatcher-type alltoall_seq --lr 1 --min-lr 2"
    )
    with pytest.raises(MegatronError) as error:
        job(base=words.split(), for_prediction=True)

    text = str(error.value)
    assert text.startswith(f"7 faults: (1) --hidden-size: {MISSING}.")
    for part in (
        "(2) --optimizer ademamix: unknown value 'ademamix'; known are",
        "(3) --num-layers: invalid int value: 'many'.",
        "(4) --recompute-method half: unknown value 'half'",
        "(5) --moe-token-dispatcher-type alltoall_seq: unknown value",
        "(6) --lr 1 and --min-lr 2: --min-lr is larger than the learning rate",
        "(7) the command line lacks --num-attention-heads, --seq-length, --max-position-embeddings, --micro-batch-size",
    ):
        assert part in text


def test_all_reasons_against_a_job_are_named_together() -> None:
    """A job of another kind is refused with every such reason, but without flags that only a decoder needs."""
    with pytest.raises(MegatronError) as error:
        job(
            base="--ict-head-size 2 --perform-rl-step --use-checkpoint-args --optimizer Adam".split(),
            for_prediction=True,
        )

    assert "did you mean adam? (2) --use-checkpoint-args needs --load or --pretrained-checkpoint;" in str(error.value)
    assert str(error.value).endswith("(4) --perform-rl-step: reinforcement learning steps are not modelled")


def test_sizes_are_at_least_one() -> None:
    """A size of 0 is refused in the user's own words."""
    with pytest.raises(MegatronError, match="--num-layers=0: must be at least 1"):
        Arguments.parse(["--num-layers=0"], VERSION).size("num_layers")


@pytest.mark.parametrize(
    ("version", "release"), [("0.16.0", "0.16"), ("0.16.1", "0.16"), ("0.17.0rc2", "0.17"), ("1.2", "0.20")]
)
def test_releases_are_found(version: str, release: str) -> None:
    """Patch releases and newer releases use the nearest known release below."""
    assert release == known_release(version)


@pytest.mark.parametrize("version", ["0.15.3", "core", ""])
def test_unknown_versions_are_refused(version: str) -> None:
    """Releases before 0.16 and texts that are no version are refused."""
    with pytest.raises(MegatronError, match=version or "''"):
        release_of(version)


def test_unknown_flags_stand_alone() -> None:
    """The values of an unknown flag stay single words, in their places."""
    assert (Token(words=("--mine",)), Token(words=("3",))) == tokenise(["--mine", "3"], VERSION)


def test_short_flags_are_words() -> None:
    """`-h` and words that begin with it are words, not flags."""
    assert ("-h", "-hh", "--bf16") == Arguments.parse(["-h", "-hh", "--bf16"], VERSION).words


def test_flags_come_and_go_with_releases() -> None:
    """A flag is known only in the releases that have it."""
    assert "--hybrid-layer-pattern" not in flag_table("0.16.1")
    assert "--hybrid-layer-pattern" in flag_table("0.17.0")
    assert "--use-legacy-models" not in flag_table("0.18.0")


Purpose = Literal["for_prediction", "for_planning"]
FLAGS = sorted(option for option in flag_table("0.16.1") if option.startswith("--") and "_" not in option)


def complaint(words: str, *, base: list[str] | None = None, purpose: Purpose = "for_prediction") -> str:
    """Return the error of a command line that is predicted or planned."""
    with pytest.raises(MegatronError) as error:
        job(words, base=SMALL if base is None else base, **{purpose: True})  # type: ignore[arg-type]
    return str(error.value)


@pytest.mark.parametrize(
    ("words", "unread"),
    [
        ("--num_layers 32", "; words that are no flags of Megatron 0.16.1: --num_layers (did you mean --num-layers?)"),
        (
            "-num-layer 32 --Hidden-Size 64",
            "-num-layer (did you mean --num-layers?), --Hidden-Size (did you mean --",
        ),
        ("--recipe llama3_8b", "; words that are no flags of Megatron 0.16.1: --recipe"),
        ("conf.yaml", "; words that are no flags of Megatron 0.16.1: conf.yaml"),
        ("--hybrid-layer-pattern MMM", "--hybrid-layer-pattern (in 0.17 to 0.20)"),
        ("--bf16", "; add what is missing to the script's arguments"),
    ],
)
def test_an_error_about_missing_flags_names_what_was_not_read(words: str, unread: str) -> None:
    """The words that were not read may have the missing values."""
    said = complaint(words, base=[])

    assert said.startswith("the command line lacks --num-layers, --hidden-size, --num-attention-heads, --seq-length")
    assert unread in said


def test_a_launched_script_judges_its_own_words() -> None:
    """A launched script may have flags that differ from Megatron's only in spelling."""
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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([" --bf16"], ":  --bf16 (did you mean --bf16?);"),
        (["-v", "--mine"], ": -v, --mine;"),
        (["--mine", "4", "-1", "-0.5", "x", "--bf16", "--"], ": --mine;"),
    ],
)
def test_words_that_begin_with_a_dash_are_named(words: list[str], expected: str) -> None:
    """Numbers and other words may be values of a script's own flags, so only words like flags are named."""
    notes = unknown_note(Arguments.parse(words, "0.16.1"))

    begins = f"not flags of Megatron 0.16.1, so without effect here{expected}"
    assert [begins] * bool(expected) == [note[: len(begins)] for note in notes]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--bf16", ""], ["'' (an unset variable in quotes?)"]),
        (["train", "--lr", "1e-4", "1e-5"], ["train", "1e-5"]),
        (["--mine", "a", "b", "--bf16"], ["--mine"]),
        (["--bf16", "--", "x"], []),
    ],
)
def test_words_of_no_flag_are_named(words: list[str], expected: list[str]) -> None:
    """Megatron's parser stops at an empty word or a second value, so a note names them."""
    assert expected == unread_words(Arguments.parse(words, VERSION))


def test_flags_of_other_releases_are_named_with_their_releases() -> None:
    """A user may have the flags of one release and the sources of another."""
    (note,) = unknown_note(Arguments.parse(["--hybrid-layer-pattern", "MM"], "0.16.1"))

    assert "--hybrid-layer-pattern (in 0.17 to 0.20)" in note
