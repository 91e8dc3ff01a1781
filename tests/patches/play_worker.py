"""A worker for the tests: plays training programs, good and bad, and prints its findings as one line of JSON."""

import functools
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist

from pipette_patches import play, registry
from pipette_patches.run import Program

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--vocab-size 256 --transformer-impl local --lr 1e-3 --train-iters 5 --micro-batch-size 1 --global-batch-size 8"
).split()
TRAINS = """
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
get_forward_backward_func()(model=[], forward_step_func=None, num_microbatches=1)
"""
DATA = """
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset

class Documents(MegatronDataset):
    rank = None
    def __init__(self, documents, path, indices, num_samples, split, config):
        Documents.rank = torch.distributed.get_rank()
        super().__init__(documents, path, indices, num_samples, split, config)
    @staticmethod
    def numel_low_level_dataset(documents):
        return len(documents.document_indices) - 1
    @staticmethod
    def build_low_level_dataset(path, config):
        return IndexedDataset(path)
    def __len__(self):
        return self.num_samples
    def __getitem__(self, index):
        return self.dataset[index]

torch.distributed.init_process_group("gloo")
config = BlendedMegatronDatasetConfig(random_seed=1, sequence_length=64, blend=None, split=None, tokenizer=None)
training, *_ = BlendedMegatronDatasetBuilder(Documents, [1 << 40, 8, 8], lambda: True, config).build()
torch.distributed.destroy_process_group()
raise SystemExit([len(training), Documents.rank, len(training[0]), len(training.indices)])
"""
SCRIPTS = {
    "exits": "import sys; sys.exit(3)",
    "raises": "raise ValueError('no data here')",
    "ends": "",
    "reads": "input()",
    "catches all errors": f"try:\n    exec({TRAINS!r})\nexcept Exception:\n    pass",
    "sets a handler": f"import signal\nsignal.signal(signal.SIGTERM, lambda *_: None)\n{TRAINS}",
    "prints much": f"print('x' * (1 << 22))\n{TRAINS}",
    "writes": f"import sys\nopen(sys.argv[1], 'w').write('x')\n{TRAINS}",
    "makes a folder": f"import os, sys\nos.mkdir(sys.argv[1])\n{TRAINS}",
    "removes a tree": "import os, shutil, sys, tempfile\nos.makedirs(sys.argv[1])\nshutil.rmtree(sys.argv[1])\n"
    f"with tempfile.TemporaryDirectory() as folder:\n    open(f'{{folder}}/x', 'w').write('x')\n{TRAINS}",
    "makes a folder past Python": "import posix, sys\nposix.mkdir(sys.argv[1])",
    "writes a temporary file": f"import tempfile\ntempfile.TemporaryFile().write(b'x')\n{TRAINS}",
    "mocks a data set": DATA,
    "calls home": "import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=5)",
}


def stop(*_play_and_step: object) -> None:
    """End the program at its first training step."""
    raise play.Stop


def outcome(path: Path, target: Path) -> str:
    """Play a script, and return `trains` or its error."""
    program = Program(patches=(), name=str(path), is_module=False, arguments=(str(target),))
    try:
        with play.played(functools.partial(play.run_script, program), rank=1, world_size=4, on_step=stop):
            return "trains"
    except Exception as error:  # noqa: BLE001
        # Scripts raise any error.
        return f"{type(error).__name__}: {error}"


def kept_tensors() -> list[object]:
    """Return what is left after a play of the empty gradients and offloaded tensors that libraries keep."""
    names = (
        "transformer_engine.pytorch.module.base",
        "megatron.core.pipeline_parallel.fine_grained_activation_offload",
    )
    engine, offloading = map(ModuleType, names)
    engine._dummy_wgrads = {(2, 2): "a gradient"}  # type: ignore[attr-defined]
    offloading.PipelineOffloadManager = SimpleNamespace(OFFLOAD_MGR="tensors")  # type: ignore[attr-defined]
    with (
        mock.patch.dict(sys.modules, zip(names, (engine, offloading), strict=True)),
        play.played(stop, rank=0, world_size=1, on_step=stop),
    ):
        pass
    return [engine._dummy_wgrads, offloading.PipelineOffloadManager.OFFLOAD_MGR]


def example() -> dict[str, Any]:
    """Play two steps of the last stage of the example, and return what can be seen of them."""
    found: dict[str, Any] = {"steps": []}

    def on_step(seen: play.Play, step: play.Step) -> Any:
        if seen.num_steps == 3:
            raise play.Stop
        reports = step.run(num_microbatches=2)
        found["steps"].append([step.arguments["num_microbatches"], len(reports), len(step.chunks)])
        return reports

    layout = ["--pipeline-model-parallel-size", "2", "--no-check-for-nan-in-loss-and-grad"]
    program = Program(patches=(), name=str(EXAMPLE), is_module=False, arguments=(*FLAGS, *layout))
    argv, rank = list(sys.argv), os.environ.get("RANK")
    with play.played(functools.partial(play.run_script, program), rank=2, world_size=4, on_step=on_step) as seen:
        found["world"] = [dist.get_rank(), dist.get_world_size(), dist.get_backend()]
        found["optimizers"] = len(seen.optimizers)
    found["left"] = [dist.is_initialized(), sys.argv == argv, os.environ.get("RANK") == rank]
    return found


def experts(num_layers: int) -> str:
    """Play two steps of a model whose routers note a loss of each layer, and return `trains` or the error."""

    def on_step(seen: play.Play, step: play.Step) -> Any:
        return step.run() if seen.num_steps == 1 else stop(seen, step)

    routers = (
        "--num-experts 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --disable-bias-linear"
    )
    words = (*FLAGS, *routers.split(), "--num-layers", str(num_layers))
    program = Program(patches=(), name=str(EXAMPLE), is_module=False, arguments=words)
    try:
        with play.played(functools.partial(play.run_script, program), rank=0, world_size=1, on_step=on_step):
            return "trains"
    except IndexError as error:
        return str(error)


def main(folder: Path) -> None:
    """Play everything, below an empty folder."""
    found: dict[str, Any] = {"example": example(), "outcomes": {}, "experts": [experts(2), experts(3)]}
    found["kept tensors"] = kept_tensors()
    handler = signal.getsignal(signal.SIGTERM)
    sys.stdout.flush()
    output, sys.stdout = sys.stdout, Path(os.devnull).open("w")  # noqa: SIM115
    for name, text in SCRIPTS.items():
        path, target = folder / "script.py", folder / "target"
        path.write_text(text)
        found["outcomes"][name] = outcome(path, target).replace(str(folder), "FOLDER")
        assert not target.exists()
    sys.stdout = output
    found["same handler"] = signal.getsignal(signal.SIGTERM) is handler
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    registry.apply("cpu_backend")
    main(Path(sys.argv[1]))
