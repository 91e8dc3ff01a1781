"""What the workers run under a decision."""

from dataclasses import replace

from pipette_launch.facts.messages.round import Decision
from pipette_launch.launch.commands import training
from pipette_launch.launch.options import Options

OPTIONS = Options(script="train.py", script_arguments=("--lr", "1"), runs_python=True, is_module=False)
DECISION = Decision(
    phase="train",
    tokens=("t",),
    hosts=("a",),
    num_slots=(2,),
)


def test_own_configuration_is_torchruns_own_command() -> None:
    """Without a plan nothing is added, removed or reordered."""
    words = ("-u", "train.py", "--lr", "1")

    assert words == training(DECISION, OPTIONS, "python", words).arguments


def test_arguments_are_exchanged() -> None:
    """Only what stands behind the script changes, torchrun's own additions before it stay."""
    planned = replace(DECISION, script_arguments=("--lr", "1", "--micro-batch-size", "2"), environment={"A": "1"})

    command = training(planned, OPTIONS, "python", ("-u", "train.py", "--local-rank=${local_rank}", "--lr", "1"))

    assert ("-u", "train.py", "--local-rank=${local_rank}", "--lr", "1", "--micro-batch-size", "2") == command.arguments
    assert {"A": "1"} == command.environment


def test_patches_go_before_the_script() -> None:
    """The wrapper runs the script, or the module, with the same words."""
    patched = replace(DECISION, patches=("cpu_backend",))

    command = training(patched, OPTIONS, "python", ("-u", "-m", "train.py", "--lr", "1"))

    assert "-u -m pipette_patches.run --patch cpu_backend -- -m train.py --lr 1" == " ".join(command.arguments)
