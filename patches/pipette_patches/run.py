"""Apply patches, then run a Python program as `python` itself would.

    python -m pipette_patches.run --patch cpu_backend -- pretrain_gpt.py --num-layers 4 ...
    python -m pipette_patches.run --patch cpu_backend -- -m my.trainer --num-layers 4 ...

The program sees its own sys.argv, sys.path[0], __main__ and __file__. This process ends with the exit code of the
program. Tracebacks begin in the program's own file. Processes that multiprocessing spawns are patched too.
"""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from pipette_launch.errors import PipetteError, UsageError
from pipette_launch.text import printable
from pipette_patches import registry

USAGE = "usage: python -m pipette_patches.run --patch NAME [--patch NAME ...] -- [-m MODULE | SCRIPT] [ARGUMENT ...]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A Python program to run, and the patches to apply before the program starts."""

    patches: tuple[str, ...]
    name: str
    """Path of a script, or dotted name of a module."""
    is_module: bool
    arguments: tuple[str, ...]


def read(argv: Sequence[str]) -> Program:
    """Read the patches, the program and the arguments of the program from the command line."""
    rest = list(argv)
    patches = []
    while rest and rest[0].startswith("--patch"):
        flag, equals, name = rest.pop(0).partition("=")
        if flag != "--patch" or not (equals or rest):
            raise UsageError(f"cannot read {flag!r}\n{USAGE}")
        patches.append(name if equals else rest.pop(0))
    if rest and rest[0] == "--":
        rest.pop(0)
    is_module = bool(rest) and rest[0] == "-m"
    if is_module:
        rest.pop(0)
    if not rest or (rest[0].startswith("-") and not is_module):
        raise UsageError(f"expected a script, or -m and a module, got {rest[0] if rest else 'nothing'!r}\n{USAGE}")
    return Program(patches=tuple(patches), name=rest[0], is_module=is_module, arguments=tuple(rest[1:]))


def load(program: Program) -> tuple[CodeType, ModuleType]:
    """Compile the program, make its `__main__` module, and set sys.argv and sys.path[0] as python would."""
    main = ModuleType("__main__")
    vars(main).update(__cached__=None, __annotations__={}, __builtins__=__builtins__)
    if program.is_module:
        sys.argv[:] = ["-m", *program.arguments]
        spec = _find(program.name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _find(f"{program.name}.__main__")
        code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec is not None else None
        if spec is None or code is None:
            raise UsageError(
                f"no module named {program.name!r} that python could run; not in {sys.path[0]} or on sys.path"
            )
        sys.argv[0] = str(spec.origin)
        vars(main).update(
            __file__=spec.origin, __spec__=spec, __loader__=spec.loader, __package__=spec.parent, __cached__=spec.cached
        )
        return code, main
    script = Path(program.name)
    sys.argv[:] = [program.name, *program.arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(script.resolve().parent)
    try:
        code = compile(script.read_bytes(), str(script.absolute()), "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(f"cannot read the script {program.name!r}: {error.strerror}") from None
    main.__file__ = str(script.absolute())
    return code, main


def _find(name: str) -> "importlib.machinery.ModuleSpec | None":
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if name.startswith(str(error.name)):
            return None
        raise


def hide_our_frames() -> None:
    """Remove the frames of this file from the traceback of an uncaught exception."""
    show = sys.excepthook

    def show_program(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        inner = trace
        while inner is not None and inner.tb_frame.f_code.co_filename != __file__:
            inner = inner.tb_next
        while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
            inner = inner.tb_next
        if inner is None and kind is not SyntaxError:
            inner = trace
        show(kind, error.with_traceback(inner), inner)

    sys.excepthook = show_program


def main(argv: Sequence[str]) -> None:
    """Apply the patches and run the program in this process."""
    hide_our_frames()
    try:
        program = read(argv)
        code, module = load(program)
        for name in program.patches:
            registry.apply(name)
    except PipetteError as error:
        sys.stderr.write(f"pipette_patches.run: {printable(str(error))}\n")
        sys.exit(error.exit_code)
    registry.patch_children()
    sys.modules["__main__"] = module
    exec(code, vars(module))  # noqa: S102


if __name__ == "__main__":
    main(sys.argv[1:])
