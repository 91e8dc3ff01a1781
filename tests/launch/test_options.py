"""The user's script, read by the launcher."""

from __future__ import annotations

from megatron_lines import SMALL

from pipette_launch.launch.options import Options, Script


def test_flags_of_the_scripts_own_do_not_matter() -> None:
    """They do not matter at the start or after a loss, even if they resemble Megatron's flags."""
    words = (*SMALL, "--micro_batch_size", "4", "--bf16", "true", "--mine", "--load", "/nowhere")
    script = Script(Options(script="train.py", script_arguments=words, runs_python=True, is_module=False), {})
    first = script.read(8, "cuda")
    again = script.read(4, "cuda", global_batch_size=first.batch.global_batch_size)

    assert (8, 4, 1) == (first.own.dp, again.own.dp, again.own.micro_batch_size)
    assert () == first.notes == again.notes
