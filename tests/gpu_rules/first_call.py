"""A device whose first call imports a compiler and whose calls of new shapes compile, on a clock that only it moves."""

from __future__ import annotations

from dataclasses import dataclass, field

Shape = tuple[int, ...]
_Pattern = tuple[int | str, ...]
"""A size for each dimension, or `any` for one that is dynamic."""


@dataclass(kw_only=True)
class CompilingDevice:
    """One process in which Megatron's fused functions are compiled (megatron/core/jit.py: `jit_fuser = torch.compile`).

    Rules, of torch 2.13:
    - The first call of a compiled function imports torch._inductor and Triton; that happens once in a process
      (torch/__init__.py, `_TorchCompileInductorWrapper.__init__`; Python's sys.modules).
    - Code is compiled anew for each state of `torch.is_grad_enabled` and each pattern of `requires_grad`
      (torch/_guards and _dynamo/guards.py: GRAD_MODE, TENSOR_MATCH).
    - Sizes are static at first; a dimension whose size has changed is dynamic in the next code
      (torch/_dynamo/config.py: assume_static_by_default, automatic_dynamic_shapes).
    - A size of 1 never becomes dynamic (torch/fx/experimental/symbolic_shapes.py: specialize_zero_one).
    - A function with `limit` codes is not compiled for another call, which runs uncompiled (_dynamo/config.py,
      recompile_limit, 8; _dynamo/cache_size.py, exceeds_recompile_limit).
    Each was checked on the CPU with torch.compile and torch._dynamo.testing.CompileCounter.
    - A GPU runs at its boost clock until its mean power of the last second reaches the limit; then the clock falls
      (nvml.h: nvmlDeviceGetPowerUsage, nvmlClocksEventReasonSwPowerCap).
    """

    import_s: float
    compile_s: float
    limit: int = 8
    boost_s: float = 0.0
    """Seconds of work at the boost clock."""
    boost: float = 1.0
    """Time at the boost clock over that under the power limit."""
    now_s: float = 0.0
    uncompiled: int = 0
    """Number of calls that ran uncompiled."""
    codes: dict[str, list[tuple[str, _Pattern]]] = field(default_factory=dict)
    """The codes of each function, by its name."""
    _has_compiler: bool = False
    _worked_s: float = 0.0

    def clock(self) -> float:
        """Return the time."""
        return self.now_s

    def run(self, function: str, shape: Shape, mode: str, seconds: float) -> None:
        """Call a function on tensors of a shape, in a mode of gradients; compiled code takes `seconds`."""
        if not self._has_compiler:
            self._has_compiler = True
            self.now_s += self.import_s
        codes = self.codes.setdefault(function, [])
        if not any(mode == known and _fits(shape, pattern) for known, pattern in codes):
            if len(codes) < self.limit:
                codes.append((mode, self._pattern(shape, [pattern for _, pattern in codes])))
                self.now_s += self.compile_s
            else:
                self.uncompiled += 1
        taken_s = seconds * (self.boost if self._worked_s < self.boost_s else 1.0)
        self._worked_s += taken_s
        self.now_s += taken_s

    def _pattern(self, shape: Shape, before: list[_Pattern]) -> _Pattern:
        return tuple(
            "any" if size != 1 and any(pattern[index] != size for pattern in before) else size
            for index, size in enumerate(shape)
        )


def _fits(shape: Shape, pattern: _Pattern) -> bool:
    return all(size == wanted or (wanted == "any" and size != 1) for size, wanted in zip(shape, pattern, strict=True))
