"""The networks and models of the suite: four hosts of one slot, each fenced to 0.4 of a core."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.netlab import topology
from benchmarks.netlab.compare import ROOT
from benchmarks.netlab.topology import Topology

SCRIPT = ROOT / "examples" / "pretrain_gpt.py"
NUM_HOSTS = 4
CORES_PER_SLOT = 0.4
"""So that all of them have their part of two cores, and the kernel that carries their messages has the rest."""
USUAL_MBIT = 400.0
FAST_MBIT = 800.0
SLOW_MBIT = 200.0
RANDOM_MBIT = (100.0, 160.0, 250.0, 400.0, 640.0, 900.0)
"""Every pair of hosts gets one of them, drawn without repetition."""
SEED = 6


def uniform() -> Topology:
    """All links equal."""
    return _made({"rate_mbit": USUAL_MBIT})


def islands() -> Topology:
    """Two fast islands on slow links, whose hosts take turns in the order of hosts: neighbours are far apart."""
    islands = [{"hosts": hosts, "rate_mbit": FAST_MBIT} for hosts in (["n0", "n2"], ["n1", "n3"])]
    return _made({"rate_mbit": SLOW_MBIT, "island": islands})


def slow_node() -> Topology:
    """One host computes half as fast; links are equal."""
    return _made({"rate_mbit": USUAL_MBIT, "host": [{"name": "n1", "share": 0.5}]})


def random_matrix() -> Topology:
    """Links from 100 to 900 Mbit/s, dealt out by a seed."""
    pairs = [(f"n{a}", f"n{b}") for b in range(NUM_HOSTS) for a in range(b)]
    rates = random.Random(SEED).sample(RANDOM_MBIT, k=len(pairs))
    links = [{"between": list(pair), "rate_mbit": rate} for pair, rate in zip(pairs, rates, strict=True)]
    return _made({"link": links})


def asymmetric() -> Topology:
    """Fast around the ring n0, n1, n2, n3 against the order of hosts, slow along it; 400 Mbit/s across."""
    ring = [(f"n{a}", f"n{(a + 1) % NUM_HOSTS}") for a in range(NUM_HOSTS)]
    along = [{"from": a, "to": b, "rate_mbit": SLOW_MBIT} for a, b in ring]
    against = [{"from": b, "to": a, "rate_mbit": FAST_MBIT} for a, b in ring]
    return _made({"rate_mbit": USUAL_MBIT, "link": [*along, *against]})


def already_best() -> Topology:
    """A ring of fast links in the order of hosts, slow ones across it: no order is better than torchrun's."""
    ring = [[f"n{a}", f"n{(a + 1) % NUM_HOSTS}"] for a in range(NUM_HOSTS)]
    links = [{"between": pair, "rate_mbit": FAST_MBIT} for pair in ring]
    return _made({"rate_mbit": SLOW_MBIT, "link": links})


TOPOLOGIES: Mapping[str, Callable[[], Topology]] = {
    "uniform": uniform,
    "islands": islands,
    "slow-node": slow_node,
    "random": random_matrix,
    "asymmetric": asymmetric,
    "already-best": already_best,
}


def _made(document: Mapping[str, Any]) -> Topology:
    return topology.parse({"hosts": NUM_HOSTS, "cores_per_slot": CORES_PER_SLOT, **document})


def gpt(*, layers: int, hidden: int, seq: int, batch: int) -> tuple[str, ...]:
    """Flags of a GPT as Megatron's rules of thumb would run it: plain data parallelism, the optimizer distributed."""
    words = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads 4 --seq-length {seq} "
        f"--max-position-embeddings {seq} --vocab-size 256 --transformer-impl local --attention-dropout 0 "
        f"--hidden-dropout 0 --lr 1e-3 "
        f"--global-batch-size {batch} --use-distributed-optimizer --log-interval 1"
    )
    return tuple(words.split())


MODELS: Mapping[str, tuple[str, ...]] = {
    "communication-heavy": gpt(layers=4, hidden=320, seq=64, batch=8),
    "balanced": gpt(layers=4, hidden=256, seq=128, batch=8),
    "compute-heavy": gpt(layers=4, hidden=128, seq=256, batch=16),
}
"""Flags of examples/pretrain_gpt.py, --train-iters and --micro-batch-size apart."""


def training(model: str, *, iterations: int, num_slots: int = NUM_HOSTS) -> tuple[str, ...]:
    """Return the script with all its flags: what stands behind torchrun or pipette-launch; one micro-batch a rank."""
    words = MODELS[model]
    batch = int(words[words.index("--global-batch-size") + 1])
    return (str(SCRIPT), *words, "--micro-batch-size", str(batch // num_slots), "--train-iters", str(iterations))


NVIDIA = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 4 --global-batch-size 16 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 "
    "--split 90,5,5 --eval-iters 0 --eval-interval 1000 --log-interval 1 --transformer-impl local "
    "--attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer"
)
"""Flags of Megatron-LM's own pretrain_gpt.py, --train-iters apart."""


def megatron_lm() -> Path | None:
    """Return the checkout of Megatron-LM that MEGATRON_LM_DIR names; None without one."""
    folder = os.environ.get("MEGATRON_LM_DIR")
    return Path(folder) if folder else None


def nvidia_training(checkout: Path, *, iterations: int) -> tuple[str, ...]:
    """Return NVIDIA's script with all its flags, one micro-batch a rank."""
    return (str(checkout / "pretrain_gpt.py"), *NVIDIA.split(), "--train-iters", str(iterations))
