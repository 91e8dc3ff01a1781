"""Play one rank of a training program in this process, without other ranks, up to the program's first training step.

The program runs unchanged under a fake process group, in which no collective waits for other ranks. Some collectives
copy this rank's own data, which takes time at large degrees. Each training step calls the function that megatron-core's
`get_forward_backward_func` returns, so the player replaces this function. So a program may use Megatron's `pretrain()`
or its own training loop. One process can play several programs in turn, and only the first play pays for imports.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from pipette_launch.errors import PipetteError
from pipette_patches.replacements import Replacements, in_module, wrapping
from pipette_patches.run import Program, load
from pipette_patches.scratch import WRITES, Scratch, writing_copies
from pipette_patches.without_cuda import no_coalescing


class PlayError(PipetteError):
    """Error: the program that is played did not reach its first training step."""


class Stop(BaseException):
    """Ends the program that is played. `except Exception` in the program does not catch `Stop`."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step that the program requests: a call of megatron-core's schedule function."""

    function: Callable[..., Any]
    arguments: dict[str, Any]

    def run(self, **changes: Any) -> Any:
        """Run forward and backward of the step, with some arguments changed, such as `num_microbatches`."""
        return self.function(**{**self.arguments, **changes})

    @property
    def chunks(self) -> list[Any]:
        """Model chunks of this rank, as the program wrapped them."""
        model = self.arguments["model"]
        return list(model) if isinstance(model, (list, tuple)) else [model]


@dataclass(kw_only=True)
class Play:
    """The rank that is played, and the training steps and optimizers that the program has made so far."""

    rank: int
    world_size: int
    on_step: Callable[[Play, Step], Any]
    """Function that replaces each training step: runs the step and returns its result, or raises `Stop`."""
    num_steps: int = 0
    """Number of training steps that the program has requested."""
    optimizers: list[Any] = field(default_factory=list)
    """Megatron's optimizers that the program has made."""
    may_end: bool = False
    """True if the program has made enough training steps to end by itself."""


MOST_SAMPLES = 1 << 20
"""Most samples of a mock data set, because the index of a long training takes gigabytes."""
_playing: list[Play] = []
"""The present play. The replacements below stay, because modules that the program imported refer to them."""


@wrapping
def _fake_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _playing:
        return original(*args, **kwargs)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return original("fake", store=FakeStore(), rank=_playing[0].rank, world_size=_playing[0].world_size)


@wrapping
def _own_groups(original: Callable[..., Any], ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Make a fake process group, but only if the group has this rank. Other groups (thousands) would never be used."""
    if not _playing:
        return original(ranks, *args, **kwargs)
    if ranks is not None and _playing[0].rank not in ranks:
        return dist.GroupMember.NON_GROUP_MEMBER
    return original(ranks)


@wrapping
def _door(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    function = original(*args, **kwargs)

    @functools.wraps(function)
    def step(**arguments: Any) -> Any:
        if not _playing:
            return function(**arguments)
        play = _playing[0]
        play.num_steps += 1
        return play.on_step(play, Step(function=function, arguments=arguments))

    return step


def _while_playing(answer: Callable[[], object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a function by `answer` while a program is played."""
    return wrapping(lambda original, *args, **kwargs: answer() if _playing else original(*args, **kwargs))


@wrapping
def _seen_optimizer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    optimizer = original(*args, **kwargs)
    if _playing:
        _playing[0].optimizers.append(optimizer)
    return optimizer


@wrapping
def _trains(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Set `do_train` of Megatron-LM's trainer, which a stage without data would receive from another rank."""
    iterators = original(*args, **kwargs)
    if _playing:
        sys.modules["megatron.training.global_vars"].get_args().do_train = True
    return iterators


_BUFFER, _FSDP = "param_and_grad_buffer", "megatron.core.distributed.fsdp.src.megatron_fsdp"


@wrapping
def _random_documents(
    original: Callable[..., Any], builder: Any, path: str | None, split: Any, sizes: Any, *args: Any, **kwargs: Any
) -> Any:
    """Give mock data sets a file of documents, which classes without samples of their own read, and few samples."""
    if not _playing or path is not None:
        return original(builder, path, split, sizes, *args, **kwargs)
    few = [size and min(size, MOST_SAMPLES) for size in sizes]
    # On other ranks, data sets would wait for files that rank 0 writes. Ranks in groups decide which chunks read data.
    rank_in = dist.get_rank
    with mock.patch.object(dist, "get_rank", lambda group=None: rank_in(group) if group is not None else 0):
        return original(builder, _documents(builder.config.sequence_length), split, few, *args, **kwargs)


def _documents(seq_length: int) -> str:
    """Write documents of short sentences into the temporary folder, and return their path for Megatron."""
    from megatron.core.datasets import indexed_dataset

    path = str(Path(tempfile.gettempdir()) / "documents")
    writer = indexed_dataset.IndexedDatasetBuilder(indexed_dataset.get_bin_path(path))
    # Megatron skips documents with a sentence above 512 tokens.
    lengths = [min(max(seq_length // 8, 1), 500)] * 64
    for _ in range(48):
        writer.add_document(torch.arange(sum(lengths)) % 60 + 1, lengths)
    writer.finalize(indexed_dataset.get_idx_path(path))
    return path


@functools.cache
def open_door() -> None:
    """Install the replacements in torch and megatron-core, and the audit hook that guards files and network."""
    sys.addaudithook(_guard)
    Replacements(
        (
            *in_module("torch.distributed", {"init_process_group": _fake_group, "new_group": _own_groups}),
            # Megatron spends most of its time on groups of other ranks, also before it calls torch.
            *in_module("megatron.core.parallel_state", {"create_group": _own_groups}),
            # A script may choose a device by the rank that it plays. A fake group has no coalesced collectives.
            *in_module("torch.cuda", {"set_device": _while_playing(bool)}),
            *in_module(f"megatron.core.distributed.{_BUFFER}", {"_coalescing_manager": _while_playing(no_coalescing)}),
            *in_module(f"{_FSDP}.{_BUFFER}", {"_coalescing_manager": _while_playing(no_coalescing)}),
            *in_module("megatron.core.optimizer", {"get_megatron_optimizer": _seen_optimizer}),
            *in_module(
                "megatron.core.datasets.blended_megatron_dataset_builder",
                {"BlendedMegatronDatasetBuilder._build_megatron_dataset_splits": _random_documents},
            ),
            *in_module("megatron.training.training", {"build_train_valid_test_data_iterators": _trains}),
            *in_module("megatron.core.pipeline_parallel", {"get_forward_backward_func": _door}),
            *in_module("megatron.core.pipeline_parallel.schedules", {"get_forward_backward_func": _door}),
        )
    ).apply()


@contextlib.contextmanager
def played(
    program: Callable[[], object], *, rank: int, world_size: int, on_step: Callable[[Play, Step], Any]
) -> Iterator[Play]:
    """Run a program as one rank until `on_step` raises `Stop`; its process groups and tensors exist inside the block.

    At the end of the block all process groups, graphs and global variables of Megatron are gone. A program that ends
    before `on_step` stops it raises PlayError. Errors of the program are raised unchanged.
    """
    open_door()
    play = Play(rank=rank, world_size=world_size, on_step=on_step)
    _playing.append(play)
    try:
        with _as_rank(rank, world_size), _guarded():
            try:
                program()
            except Stop:
                pass
            except SystemExit as error:
                if not play.may_end:
                    raise PlayError(f"the script exits with {error.code!r} {_before(play)}") from error
            else:
                if not play.may_end:
                    raise PlayError(f"the script ends {_before(play)}")
        yield play
    finally:
        play.optimizers.clear()
        _forget()
        _playing.clear()


def _before(play: Play) -> str:
    return f"after {play.num_steps} training steps" if play.num_steps else "before its first training step"


INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
CACHES = ("__pycache__", ".cache", ".triton", ".nv", ".deep_gemm", "torchinductor_")
"""Beginnings of names of folders in which compilers keep their results."""
_CHANGES = {
    *("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.truncate", "shutil.rmtree"),
    *("os.chmod", "os.chown", "os.utime"),
}


def _guard(event: str, args: tuple[Any, ...]) -> None:
    """Refuse to change files and to reach other machines while a program is played (an audit hook of Python)."""
    if not _folders:
        return
    if event == "open" and isinstance(args[0], (str, os.PathLike)) and args[2] & WRITES:
        _check(args[0])
    elif event in ("os.remove", "os.rmdir") and args[1] >= 0:
        _check(os.path.join(os.readlink(f"/proc/self/fd/{args[1]}"), os.fsdecode(args[0])))
    elif event in _CHANGES:
        for path in args[: 2 if event == "os.rename" else 1]:
            if not isinstance(path, int):
                _check(path)
    elif event == "sqlite3.connect" and args[0] not in ("", ":memory:"):
        _check(args[0])
    elif event == "socket.connect" and isinstance(args[1], tuple) and not str(args[1][0]).startswith(("127.", "::1")):
        raise ConnectionRefusedError(f"{args[1][0]}: the script is only measured, so it reaches no other machine")


def _check(path: Any) -> None:
    whole = os.path.abspath(os.fsdecode(path))
    if not _is_free(whole):
        raise PermissionError(f"{whole}: the script is only measured, so it changes no file")


def _is_free(whole: str) -> bool:
    """Return True for a file that a played script may change in place: in its temporary folder, or of a cache."""
    path = Path(whole)
    caches = (value for name, value in os.environ.items() if "CACHE" in name and value.startswith("/"))
    is_ours = path.parts[1:2] in (("dev",), ("proc",)) or any(map(path.is_relative_to, (_folders[0], *caches)))
    return is_ours or any(part.startswith(CACHES) for part in path.parts)


_folders: list[str] = []
"""Folder for temporary files of the program that is played; empty between plays."""


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Give the program a folder for temporary files and for copies of the files that it changes."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="pipette_play_") as folder:
        tempfile.tempdir = folder
        _folders.append(folder)
        try:
            with writing_copies(Scratch(folder, _is_free)):
                yield
        finally:
            _folders.clear()
            tempfile.tempdir = before


@contextlib.contextmanager
def _as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Give the program torchrun's variables and an empty standard input; restore signal handlers at the end."""
    # In a container, the user may have no name.
    user = os.environ.get("LOGNAME") or os.environ.get("USER") or os.getuid()
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        # The script must not wait for downloads or for a logging service, because only one rank runs.
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        # torch's compiler would otherwise keep its results in the program's temporary folder, which is deleted.
        INDUCTOR: os.environ.get(INDUCTOR) or f"{tempfile.gettempdir()}/torchinductor_{user}",
    }
    argv, path, main, stdin = list(sys.argv), list(sys.path), sys.modules["__main__"], sys.stdin
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        with Path(os.devnull).open() as nothing, _environment(variables):
            sys.stdin = nothing
            yield
    finally:
        sys.argv[:], sys.path[:], sys.modules["__main__"], sys.stdin = argv, path, main, stdin
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables during the block. Other variables that a script sets stay: Transformer Engine reads them later."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


def run_script(program: Program, **variables: str) -> None:
    """Run a script or module as `python` itself would, in this process, with more variables in its environment."""
    code, main = load(program)
    sys.modules["__main__"] = main
    with _environment(variables):
        exec(code, vars(main))  # noqa: S102


_LOSSES = {
    "parallel_state": "_MOE_LAYER_WISE_LOGGING_TRACKER.clear",
    "transformer.moe.moe_utils": "_MOE_LAYER_WISE_LOGGING_TRACKER.clear",
    "transformer.moe.moe_logging": "destroy_moe_metrics_tracker",
    "transformer.multi_token_prediction": "MTPLossLoggingHelper.tracker.clear",
    "transformer.experimental_attention_variant.dsa": "DSAIndexerLossLoggingHelper.tracker.clear",
}
"""Functions of several releases that forget the losses of layers. The table keeps the length of the first model."""
_OFFLOADING = "megatron.core.pipeline_parallel.fine_grained_activation_offload"


def _forget() -> None:
    """Remove process groups, CUDA graphs, and global variables and tensors of Megatron and Transformer Engine."""
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
    from megatron.core.tensor_parallel import random

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_global_memory_buffer()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    trainer = sys.modules.get("megatron.training.global_vars")
    if trainer is not None:
        trainer.destroy_global_vars()
    for module, path in _LOSSES.items():
        with contextlib.suppress(AttributeError):
            attrgetter(path)(sys.modules.get(f"megatron.core.{module}"))()
    # The next play may need a random number generator for CUDA graphs, or none.
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
    offloading: Any = sys.modules.get(_OFFLOADING)
    if offloading is not None:
        # The manager keeps tensors that the last play offloaded.
        offloading.PipelineOffloadManager.OFFLOAD_MGR = None
    # Transformer Engine 2.2 to 2.18 keeps an empty weight gradient for each weight shape (module/base.py,
    # get_dummy_wgrad). A training keeps only the shapes of its own layers.
    getattr(sys.modules.get("transformer_engine.pytorch.module.base"), "_dummy_wgrads", {}).clear()
    engine: Any = sys.modules.get("transformer_engine.pytorch.fp8")
    if engine is not None:
        # Transformer Engine would keep and update the FP8 scales of freed layers.
        engine.FP8GlobalStateManager.reset()
    graphs: Any = sys.modules.get("megatron.core.transformer.cuda_graphs")
    record = getattr(graphs, "_CudagraphGlobalRecord", None)
    if record is not None and (record.cudagraph_created or record.cudagraph_record):
        graphs.delete_cuda_graphs()
        graphs.fwd_buffer_reuse_ref_count = graphs.bwd_buffer_reuse_ref_count = 0
        # From 0.16 to 0.18 lists in a class keep the graphs' inputs for ever.
        for buffers in vars(type(getattr(record, "tensor_reuse_pool", None))).values():
            if isinstance(buffers, (list, set)):
                buffers.clear()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Megatron captures graphs in a stream of its own.
        torch.cuda.set_stream(torch.cuda.default_stream())
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
