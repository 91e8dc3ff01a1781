"""The example trainer on a device that is fuller than anybody knew: `TIGHT_BYTES` is all that its tensors get.

The memory goes when the first optimizer is made: a warm-up before it measured an empty device, groups and threads are
there, and what fails then fails as it would for a user: in CUDA's own allocation, or on a CPU in the C library's.
"""

from __future__ import annotations

import os
import resource
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

_held: list[torch.Tensor] = []
_tight: list[bool] = []
VM_DATA = "VmData:"


def tighten(total_bytes: int) -> None:
    """Leave this number of bytes to the tensors of this process; on a CPU only to tensors that it makes later."""
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        left_bytes = total_bytes - torch.cuda.memory_allocated()
        _held.append(torch.empty(max(free - left_bytes, 0), dtype=torch.uint8, device="cuda"))
        return
    status = Path("/proc/self/status").read_text(encoding="ascii")
    held_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith(VM_DATA))
    limit = 1024 * held_kib + total_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main() -> None:
    """Be the example trainer."""
    trainer = Path(__file__).parent.parent.parent / "examples" / "pretrain_gpt.py"
    make = torch.optim.Optimizer.__init__

    def tighten_and_make(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if not _tight:
            _tight.append(True)
            tighten(int(os.environ["TIGHT_BYTES"]))
        make(optimizer, *args, **kwargs)

    torch.optim.Optimizer.__init__ = tighten_and_make  # type: ignore[method-assign]
    sys.path.insert(0, str(trainer.parent))
    runpy.run_path(str(trainer), run_name="__main__")


if __name__ == "__main__":
    main()
