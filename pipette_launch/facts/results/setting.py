"""What a plan was made for, so that its file alone can be shown and compared."""

from __future__ import annotations

from dataclasses import dataclass

from pipette_launch.errors import FactError


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The job and the machines of a plan, in words and sizes; nothing is computed from them."""

    script: str
    arguments: tuple[str, ...]
    """Behind the script's name, as the user gave them."""
    new_arguments: tuple[str, ...]
    """The same with the plan's layout written in."""
    num_parameters: int
    global_batch_size: int
    seq_length: int
    device_name: str
    device_memory_bytes: int
    machines: str
    """Where the machines' figures come from."""
    network: str
    """What lies between imagined hosts; empty where it was measured or there is one host."""

    def __post_init__(self) -> None:
        for name in ("num_parameters", "global_batch_size", "seq_length", "device_memory_bytes"):
            if getattr(self, name) < 1:
                raise FactError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that an optimizer step sees."""
        return self.global_batch_size * self.seq_length
