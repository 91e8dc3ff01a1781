"""Tests of performance options and their flags."""

import pytest

from pipette_launch.facts import files
from pipette_launch.facts.job import OPTIMIZERS, PerformanceOptions, flag_of
from pipette_launch.megatron.flags import flag_table, releases


@pytest.mark.parametrize(
    ("option", "flag"),
    [
        ("tp_comm_overlap", "--tp-comm-overlap"),
        ("fp8", "--fp8-format"),
        ("overlap_p2p_comm", "--no-overlap-p2p-communication"),
    ],
)
def test_flag_of_an_option(option: str, flag: str) -> None:
    """The flag is the option's name with dashes, or the flag in its field."""
    assert flag_of(option) == flag


def test_an_unknown_option_is_refused() -> None:
    """An unknown option raises an error instead of appearing in a message."""
    with pytest.raises(KeyError, match="no_such"):
        flag_of("no_such")


def test_a_file_names_only_the_options_that_are_no_defaults() -> None:
    """A message to a thousand workers does not repeat a hundred defaults, and reading restores them."""
    options = PerformanceOptions(fp8="hybrid", cuda_graph_modules=("attn",))

    plain = files.to_plain(options)

    assert plain == {"fp8": "hybrid", "cuda_graph_modules": ["attn"]}
    assert files.from_plain(PerformanceOptions, plain, "here") == options


def test_every_optimizer_of_megatron_has_its_facts() -> None:
    """Lion updates single elements and leaves embeddings to Adam; Muon and SOAP update whole matrices."""
    kinds = {name for version in releases() for name in flag_table(version)["--optimizer"].choices or ()}

    assert kinds == set(OPTIMIZERS)
    assert ["adam", "sgd", "lion"] == [name for name, kind in OPTIMIZERS.items() if kind.is_elementwise]
    assert {"adam", "sgd"} == {name for name, kind in OPTIMIZERS.items() if not kind.is_for_matrices}
    assert (8, 4) == (OPTIMIZERS["adam"].state_bytes, OPTIMIZERS["muon"].state_bytes)
