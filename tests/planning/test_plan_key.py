"""The key of a plan: whatever the plan depends on changes the key, and nothing else does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_model

from pipette_launch.facts import Host, Layout
from pipette_launch.planning.plan_key import plan_key

HOSTS = tiny_cluster().hosts
GIVEN: dict[str, Any] = {
    "hosts": HOSTS,
    "job": tiny_job(),
    "versions": {"torch": "2.13.0"},
    "settings": (0.02, 0.08),
    "environ": {"OMP_NUM_THREADS": "1", "HOME": "/root"},
}


def with_device(**changes: Any) -> tuple[Host, ...]:
    """Return the hosts with another first device."""
    first = replace(HOSTS[0], devices=(replace(HOSTS[0].devices[0], **changes), *HOSTS[0].devices[1:]))
    return (first, *HOSTS[1:])


@pytest.mark.parametrize(
    "changes",
    [
        {"hosts": HOSTS[:1]},
        {"hosts": (replace(HOSTS[0], name="elsewhere"), HOSTS[1])},
        {"hosts": (replace(HOSTS[0], cores=99), HOSTS[1])},
        {"hosts": with_device(uuid="GPU-1")},
        {"hosts": with_device(memory_total_bytes=9 << 30)},
        {"job": tiny_job(model=tiny_model(num_layers=8))},
        {"job": tiny_job(own=Layout(tp=2, dp=2))},
        {"job": tiny_job(pinned=("tp",))},
        {"job": tiny_job(performance_flags=("--cross-entropy-loss-fusion",))},
        {"job": tiny_job(megatron_version="0.17.0")},
        {"versions": {"torch": "2.12.0"}},
        {"settings": (0.05, 0.08)},
        {"environ": {"OMP_NUM_THREADS": "2"}},
        {"environ": {"OMP_NUM_THREADS": "1", "NCCL_P2P_DISABLE": "1"}},
    ],
    ids=lambda changes: str(next(iter(changes))),
)
def test_whatever_a_plan_depends_on_is_in_the_key(changes: dict[str, Any]) -> None:
    """Another machine, model, batch, pin, version, margin or steering variable makes another key."""
    assert plan_key(**GIVEN) != plan_key(**{**GIVEN, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"hosts": HOSTS[::-1]},
        {"hosts": with_device(memory_free_bytes=1)},
        {"job": tiny_job(train_iters=77, log_interval=5, notes=("a remark",))},
        {"environ": {"OMP_NUM_THREADS": "1", "NCCL_DEBUG_FILE": "/tmp/job-17", "SLURM_JOB_ID": "17"}},
    ],
    ids=["host order", "free memory", "iterations", "environment"],
)
def test_what_changes_from_job_to_job_is_not(changes: dict[str, Any]) -> None:
    """The order of the hosts, free memory, the number of iterations and log files change no plan."""
    assert plan_key(**GIVEN) == plan_key(**{**GIVEN, **changes})


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", True),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", True),
        ("CUBLAS_WORKSPACE_CONFIG", True),
        ("NCCL_P2P_DIRECT_DISABLE", True),
        ("FI_EFA_USE_DEVICE_RDMA", True),
        ("FI_PROVIDER", True),
        ("OFI_NCCL_PROTOCOL", True),
        ("PYTORCH_ALLOC_CONF", True),
        ("PYTORCH_CUDA_ALLOC_CONF", True),
        ("PYTORCH_HIP_ALLOC_CONF", True),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", True),
        ("SHARP_COLL_ENABLE_SAT", True),
        ("TORCHINDUCTOR_MAX_AUTOTUNE", True),
        ("TORCHDYNAMO_DISABLE", True),
        ("TORCH_COMPILE_DISABLE", True),
        ("NVTE_FUSED_ATTN", True),
        ("NVSHMEM_IB_ENABLE_IBGDA", True),
        ("OMP_PROC_BIND", True),
        ("ONEDNN_MAX_CPU_ISA", True),
        ("FI_LOG_LEVEL", False),
        ("ONEDNN_VERBOSE", False),
        ("TORCHINDUCTOR_CACHE_DIR", False),
        ("CUDA_MPS_PIPE_DIRECTORY", False),
        ("CUDA_MPS_LOG_DIRECTORY", False),
        ("CUDA_VISIBLE_DEVICES", False),
        ("CUDA_CACHE_PATH", False),
    ],
)
def test_variables_that_change_speed_or_memory_are_in_the_key(name: str, counts: bool) -> None:
    """Libraries' settings count; folders and logs, which batch systems name after the job, do not."""
    changed = {**GIVEN, "environ": {**GIVEN["environ"], name: "1"}}

    assert counts == (plan_key(**GIVEN) != plan_key(**changed))
