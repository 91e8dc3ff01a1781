"""A worker for the tests: times layers with Megatron's own CUDA graphs on a simulated device, and prints findings."""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

from facts_for_tests import tiny_job, tiny_model
from gpu_rules.graphs import Graphs
from oracle.one_rank import Trainer, initialize, train_from_flags

from pipette_launch.facts import ComputeCase, Job, Layout
from pipette_launch.probe.compute.timing import HABITS, time_part
from pipette_launch.probe.instruments import CpuStopwatch
from pipette_patches import workload as patches_workload
from pipette_patches.storage_meter import StorageMeter
from pipette_patches.whole_stage import run_stage
from pipette_patches.workload import Workload, load, workload

CASE = ComputeCase(tp=1, cp=1, micro_batch_size=2)
JOB = replace(tiny_job(1), model=tiny_model(untie_embeddings_and_output_weights=True))
CHANGES = {"cuda_graph_impl": "local", "cuda_graph_scope": [], "cuda_graph_warmup_steps": 1}


def program(job: Job, layout: Layout, **changes: Any) -> Any:
    """Return a program whose layers have CUDA graphs, as a script with `--cuda-graph-impl local`."""
    return partial(train_from_flags, job, layout, changes={**CHANGES, **changes})


@contextmanager
def timed(graphs: Graphs, **changes: Any) -> Iterator[Workload]:
    """Build the layers of a case with graphs."""
    with workload(JOB, CASE, device_kind="cpu", program=partial(program, **changes), captures=True) as work:
        yield work


def layers(graphs: Graphs) -> dict[str, Any]:
    """Return captures and replays of a layer that is timed, and whether each pass of all parts runs."""
    with timed(graphs) as work:
        layer, *others = work.parts
        captured, before = graphs.captured, graphs.replays
        time = time_part(layer, CASE, slot=0, stopwatch=CpuStopwatch(), habits=HABITS["cuda"].hastier(10))
        replays = graphs.replays - before
        for part in others:
            part.backward(part.forward(1))
        return {
            "captured": captured,
            "replays": replays,
            "values": len(time.forward.values_s),
            "chains": [part.chains for part in work.parts],
            "recompute": time.recompute,
            "others": graphs.replays - before - replays,
        }


def left() -> list[object]:
    """Return what Megatron still has of graphs."""
    from megatron.core.transformer import cuda_graphs

    record, manager = cuda_graphs._CudagraphGlobalRecord, cuda_graphs.CudaGraphManager
    pool = getattr(record, "tensor_reuse_pool", None)
    buffers = pool.tensor_strong_refs if pool else []
    return [record.cudagraph_created, len(record.cudagraph_record), len(buffers), manager.global_mempool]


def refusal(graphs: Graphs, **changes: Any) -> str:
    """Return the error of a program whose layers get no graph, or whose capture fails."""
    try:
        with timed(graphs, **changes):
            return "not refused"
    except patches_workload.WorkloadError as error:
        return str(error)


def engine() -> list[Any]:
    """Return first micro-batch and number of tensors of each replay, if graphs appear between the first two steps."""
    calls: list[Any] = []

    def graphed(layer: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        calls.append(kwargs.pop("is_first_microbatch"))
        return tuple(each for each in layer.forward(*args, **kwargs) if each is not None)

    def start(job: Job, layout: Layout) -> None:
        initialize(job, layout)
        changes = {**CHANGES, "cuda_graph_impl": "transformer_engine"}
        trainer = Trainer(job, layout, 0, chunks=(1,), meter=StorageMeter(), changes=changes)
        trainer.step(1)
        for layer in trainer.chunks[0].module.decoder.layers:
            layer.cuda_graphs = [partial(graphed, layer)]
        trainer.step(2)

    package = ModuleType("transformer_engine")
    package.pytorch = ModuleType("transformer_engine.pytorch")  # type: ignore[attr-defined]
    stand_ins = {"transformer_engine": package, "transformer_engine.pytorch": package.pytorch}
    with (
        mock.patch.dict(sys.modules, stand_ins),
        mock.patch("megatron.core.transformer.transformer_layer.is_te_min_version", return_value=True),
        workload(JOB, CASE, device_kind="cpu", program=lambda *case: partial(start, *case), captures=True) as work,
    ):
        layer = work.parts[0]
        layer.backward(layer.forward(1))
        return [calls, layer.chains]


def stage(graphs: Graphs) -> list[int]:
    """Return captures and replays of the first of two stages with four micro-batches."""
    layout = Layout(pp=2, micro_batch_size=1)
    job = replace(JOB, batch=replace(JOB.batch, global_batch_size=4))
    before = graphs.captured, graphs.replays
    run_stage(job, layout, 0, device_kind="cpu", program=program, captures=True)
    return [graphs.captured - before[0], graphs.replays - before[1]]


def main() -> None:
    """Find out everything."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import cuda_graphs

    graphs = Graphs()
    original = random.initialize_rng_tracker

    def tracker(*_: object, force_reset: bool = False) -> None:
        # Megatron's generators for graphs need CUDA. The tracker for inference passes the same check and has none.
        original(inference_rng_tracker=True, force_reset=force_reset)

    states = {"get_all_rng_states": dict}
    with (
        graphs.installed(),
        mock.patch.object(random, "initialize_rng_tracker", tracker),
        mock.patch.multiple(cuda_graphs, **states),
    ):
        found: dict[str, Any] = {"layers": layers(graphs), "left": left(), "again": layers(graphs)}
        found["none"] = refusal(graphs, cuda_graph_impl="none")
        found["engine"] = engine()
        found["stage"] = stage(graphs)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    load("cpu")
    main()
