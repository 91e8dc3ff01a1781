"""A training program is played as one rank up to its training steps, and leaves nothing behind."""

from typing import Any

import pytest
from patches.findings import findings_of


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of a separate process, so that this process has no megatron-core and no process groups."""
    return findings_of("play_worker.py", str(tmp_path_factory.mktemp("scripts")))


def test_a_trainer_of_ones_own_runs_its_steps_as_one_rank(found: dict[str, Any]) -> None:
    """The example calls the schedule itself; its steps run with fewer micro-batches than the script requested."""
    assert [[4, 2, 1], [4, 2, 1]] == found["example"]["steps"]
    assert [2, 4, "fake"] == found["example"]["world"]
    assert 1 == found["example"]["optimizers"]


def test_groups_arguments_and_variables_are_as_before(found: dict[str, Any]) -> None:
    """After a play another play may follow, or the warm-up's own process group."""
    assert [False, True, True] == found["example"]["left"]


def test_a_play_frees_tensors_that_libraries_keep(found: dict[str, Any]) -> None:
    """Transformer Engine's empty gradients and Megatron's offloaded tensors would count for the next play."""
    assert [{}, None] == found["kept tensors"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("exits", "PlayError: the script exits with 3 before its first training step"),
        ("raises", "ValueError: no data here"),
        ("ends", "PlayError: the script ends before its first training step"),
        ("reads", "EOFError: EOF when reading a line"),
        ("catches all errors", "trains"),
        ("sets a handler", "trains"),
        ("prints much", "trains"),
        ("writes", "trains"),
        ("makes a folder", "trains"),
        ("removes a tree", "trains"),
        (
            "makes a folder past Python",
            "PermissionError: FOLDER/target: the script is only measured, so it changes no file",
        ),
        ("writes a temporary file", "trains"),
        ("mocks a data set", "PlayError: the script exits with [1048576, 0, 8, 16] before its first training step"),
        (
            "calls home",
            "ConnectionRefusedError: 192.0.2.1: the script is only measured, so it reaches no other machine",
        ),
    ],
)
def test_a_bad_script_ends_with_one_sentence(found: dict[str, Any], name: str, expected: str) -> None:
    """A script that does not reach its training, or would reach something, is refused with the reason."""
    assert expected == found["outcomes"][name]


def test_a_model_with_more_layers_follows(found: dict[str, Any]) -> None:
    """Megatron's table of the routers' losses has an element for each layer, and would keep its first length."""
    assert ["trains", "trains"] == found["experts"]


def test_handlers_of_signals_are_put_back(found: dict[str, Any]) -> None:
    """A script's handler for SIGTERM would keep the agent from ending the worker."""
    assert found["same handler"]
