"""Command lines are cut as argparse cuts them, and no word is lost."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipette_launch.errors import MegatronError
from pipette_launch.megatron.flags import Arguments, Flag, Token, flag_table, known_release, release_of, tokenise

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
    """Megatron's kind of parser, made from the table."""

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
        """Raise instead of leaving the process."""
        raise Refusal(message)


REFERENCE = Reference()


def read(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Our reading of the destinations above, and the words that belong to no flag."""
    arguments = Arguments.parse(argv, VERSION)
    dests = {flag_table(VERSION)[option].dest for option in OPTIONS}
    return {dest: arguments.get(dest) for dest in dests}, [
        word for token in arguments.tokens if token.flag is None for word in token.words
    ]


@settings(max_examples=200, deadline=None)
@given(words)
def test_tokens_agree_with_argparse(argv: list[str]) -> None:
    """Values, stray words and refusals are those of argparse without abbreviations."""
    try:
        namespace, stray = REFERENCE.parse_known_args(argv)
    except Refusal:
        with pytest.raises(MegatronError):
            read(argv)
        return

    assert (vars(namespace), stray) == read(argv)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.sampled_from((*OPTIONS, *WORDS, "--")), st.text(max_size=6)), max_size=8))
def test_no_word_is_lost(argv: list[str]) -> None:
    """What could be cut can be joined again, word for word."""
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
    """The last of several flags is replaced where it stands; deletion takes all of them."""
    arguments = Arguments.parse(["--lr=1", "--mine", "x", "--lr", "2", "--bf16"], VERSION)

    assert ("--lr=1", "--mine", "x", "--lr", "3", "--bf16") == arguments.with_flag("--lr", "3").words
    assert ("--mine", "x", "--bf16") == arguments.without("lr").words


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-layers"], "--num-layers: expected one argument"),
        (["--num-layers", "--bf16"], "--num-layers: expected one argument"),
        (["--rampup-batch-size", "1", "2"], "--rampup-batch-size: expected 3 arguments"),
        (["--rampup-batch-size=1"], "--rampup-batch-size: expected 3 arguments"),
        (["--bf16=yes"], "--bf16: takes no value; write it alone, or leave it out"),
        (["--sequence-parallel=True"], "--sequence-parallel: takes no value; write it alone, or leave it out"),
        (["--num-layers", "many"], "--num-layers: invalid int value: 'many'"),
    ],
)
def test_malformed_flags_are_named(argv: list[str], message: str) -> None:
    """A flag with a wrong number or kind of values is named with what was found."""
    with pytest.raises(MegatronError) as error:
        Arguments.parse(argv, VERSION).get("num_layers")

    assert message == str(error.value)


@pytest.mark.parametrize(
    ("argv", "version", "message"),
    [
        (
            "--softmax-type linear",
            "0.16.1",
            "--softmax-type linear: 'linear' is not understood; known are vanilla, off-by-one",
        ),
        ("--position-embedding-type yarn", "0.14.0", "--position-embedding-type yarn: 'yarn' is not understood"),
        ("--moe-token-dispatcher-type alltoall_seq", "0.16.1", "'alltoall_seq' is not understood"),
        ("--moe-router-load-balancing-type aux_loss even", "0.16.1", "'even' is not understood"),
        ("--attention-backend xformers", "0.20", "'xformers' is not understood"),
        ("--main-grads-dtype fp8", "0.18.0", "'fp8' is not understood"),
        ("--timing-log-level 3", "0.19.0", "3 is not understood; known are 0, 1, 2"),
    ],
)
def test_values_beside_the_choices_are_refused(argv: str, version: str, message: str) -> None:
    """Where Megatron's parser takes some values only, others are refused with those that it takes."""
    with pytest.raises(MegatronError, match=message):
        Arguments.parse(argv.split(), version)


def test_sizes_are_at_least_one() -> None:
    """A size of 0 is refused in the user's own words."""
    with pytest.raises(MegatronError, match="--num-layers=0: must be at least 1"):
        Arguments.parse(["--num-layers=0"], VERSION).size("num_layers")


@pytest.mark.parametrize(
    ("version", "release"), [("0.14.0", "0.14"), ("0.16.1", "0.16"), ("0.17.0rc2", "0.17"), ("1.2", "0.20")]
)
def test_releases_are_found(version: str, release: str) -> None:
    """Patch releases and newer ones read by the nearest release below."""
    assert release == known_release(version)


@pytest.mark.parametrize("version", ["0.13.1", "core", ""])
def test_unknown_versions_are_refused(version: str) -> None:
    """Releases before 0.14 and what is no version are refused by name."""
    with pytest.raises(MegatronError, match=version or "''"):
        release_of(version)


def test_unknown_flags_stand_alone() -> None:
    """An unknown flag's values are words like any other, so that they keep their place."""
    assert (Token(words=("--mine",)), Token(words=("3",))) == tokenise(["--mine", "3"], VERSION)


def test_short_flags_are_words() -> None:
    """Neither `-h` nor what is joined to it is cut."""
    assert ("-h", "-hh", "--bf16") == Arguments.parse(["-h", "-hh", "--bf16"], VERSION).words


def test_flags_come_and_go_with_releases() -> None:
    """A flag is known only to the releases that have it."""
    assert "--quick-geglu" not in flag_table("0.14.0")
    assert "--quick-geglu" in flag_table("0.15.0")
    assert "--use-legacy-models" not in flag_table("0.18.0")
