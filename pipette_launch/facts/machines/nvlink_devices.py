"""Modules whose hosts or racks join all devices by NVLink: SXM, superchips, NVL72."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pipette_launch.facts.machines.data_sheets import (
    AMPERE,
    BLACKWELL,
    C2C,
    EFA,
    HDR,
    HOPPER,
    NDR,
    NVLINK3,
    NVLINK4,
    NVLINK5,
    NVLINK_400_AMPERE,
    NVLINK_400_HOPPER,
    PCIE3,
    PCIE4,
    PCIE5,
    ULTRA,
    VOLTA,
    XDR,
    at,
    nvidia,
)

_V100 = partial(
    nvidia,
    exp_per_ns=80 * 16 * 1.53,
    host_gb_per_s=PCIE3,
    half_tflops=125,
    fp32_tflops=15.7,
    memory_gb_per_s=900,
    bf16=False,
    within=(5.0, 130.0),
    between=(10.0, 12.0, 2),
    efficiency=VOLTA,
    sheet="V100, January 2020",
    remark="; 4 cards of 100 Gbit/s for 8 devices",
)
_A100 = partial(
    nvidia,
    exp_per_ns=108 * 16 * 1.41,
    host_gb_per_s=PCIE4,
    half_tflops=312,
    fp32_tflops=19.5,
    within=NVLINK3,
    between=HDR,
    efficiency=AMPERE,
    sheet="A100, June 2021",
    remark="; a card of 200 Gbit/s for each device",
)
_A800 = partial(
    _A100,
    within=NVLINK_400_AMPERE,
    sheet="A800, SXM4",
    remark="; 400 GB/s of NVLink and not 600; a card of 200 Gbit/s for each device",
)
_H100 = partial(
    nvidia,
    exp_per_ns=132 * 16 * 1.755,
    host_gb_per_s=PCIE5,
    half_tflops=989,
    fp32_tflops=67,
    fp8_tflops=1979,
    within=NVLINK4,
    between=NDR,
    efficiency=HOPPER,
    sheet="H100, SXM5, without sparsity",
    remark="; a card of 400 Gbit/s for each device",
)
_H20 = partial(
    nvidia,
    exp_per_ns=78 * 16 * 1.98,
    host_gb_per_s=PCIE5,
    half_tflops=148,
    fp32_tflops=44,
    fp8_tflops=296,
    within=NVLINK4,
    between=NDR,
    # 141.8 TFLOP/s of large products in public tests: 400 W are enough for its peak, and for attention's products.
    efficiency=replace(at(HOPPER, 0.90), attention_share=0.75, narrow_shares={"fp8": 0.85}),
    sheet="HGX H20, without sparsity, as makers of servers publish it",
    remark="; a card of 400 Gbit/s for each device; memory: nvidia-smi's total, less what H100's driver keeps",
)
_GH200 = partial(
    _H100,
    host_gb_per_s=2 * C2C,
    between=HDR,
    sheet="GH200 Grace Hopper, without sparsity",
    remark="; hosts of 4 superchips joined by NVLink, a card of 200 Gbit/s for each",
    devices_per_host=4,
)
_BLACKWELL_DEVICE = partial(
    nvidia,
    exp_per_ns=148 * 16 * 1.92,
    host_gb_per_s=PCIE5,
    within=NVLINK5,
    between=NDR,
    efficiency=BLACKWELL,
)
_BLACKWELL_ULTRA = partial(_BLACKWELL_DEVICE, exp_per_ns=148 * 32 * 1.92, between=XDR, efficiency=ULTRA)
NVLINK_DEVICES = (
    _V100("V100-SXM2-32GB", memory_gib=31.73),
    _V100("V100-SXM2-16GB", memory_gib=15.77),
    _A100("A100-40GB", memory_gib=39.5, memory_gb_per_s=1555),
    _A100("A100-80GB", memory_gib=79.2, memory_gb_per_s=2039),
    _A800("A800-40GB", memory_gib=39.5, memory_gb_per_s=1555),
    _A800("A800-80GB", memory_gib=79.2, memory_gb_per_s=2039),
    _H100("H100-SXM", memory_gib=79.1, memory_gb_per_s=3350),
    _H100(
        "AWS-P5-H100",
        memory_gib=79.1,
        memory_gb_per_s=3350,
        between=EFA,
        remark="; steps between hosts as published for nanotron's cluster (all-gather of 256 MB on 2 to 64 nodes)",
    ),
    _H100("H200", memory_gib=139.8, memory_gb_per_s=4800, sheet="H200, SXM, without sparsity"),
    _H100(
        "H800-SXM",
        memory_gib=79.1,
        memory_gb_per_s=3350,
        within=NVLINK_400_HOPPER,
        sheet="H800, SXM, without sparsity",
        remark="; 400 GB/s of NVLink and not 900; a card of 400 Gbit/s for each device",
    ),
    _H20("H20", memory_gib=95.0, memory_gb_per_s=4000),
    _H20("H20-3e", memory_gib=139.8, memory_gb_per_s=4800),
    _GH200("GH200-96GB", memory_gib=94.5, memory_gb_per_s=4000),
    _GH200("GH200-144GB", memory_gib=142.5, memory_gb_per_s=4900),
    _BLACKWELL_DEVICE(
        "B200",
        half_tflops=2250,
        fp32_tflops=75,
        fp8_tflops=4500,
        fp4_tflops=9000,
        memory_gb_per_s=7700,
        memory_gib=178.35,
        sheet="Blackwell, HGX B200, without sparsity",
        remark="; a card of 400 Gbit/s for each device",
    ),
    _BLACKWELL_DEVICE(
        "GB200-NVL72",
        half_tflops=2500,
        fp32_tflops=80,
        fp8_tflops=5000,
        fp4_tflops=10000,
        memory_gb_per_s=8000,
        memory_gib=184.31,
        sheet="Blackwell, GB200 NVL72, without sparsity",
        remark="; 18 trays of 4 devices in one NVLink domain, a card of 400 Gbit/s for each device",
        devices_per_host=4,
        domain_hosts=18,
        host_gb_per_s=C2C,
    ),
    _BLACKWELL_ULTRA(
        "B300",
        half_tflops=2250,
        fp32_tflops=75,
        fp8_tflops=4500,
        fp4_tflops=13500,
        memory_gb_per_s=8000,
        memory_gib=264.7,
        sheet="Blackwell Ultra, HGX B300, without sparsity",
        remark="; a card of 800 Gbit/s for each device; memory: 288 GB, less the share that B200's driver keeps",
    ),
    _BLACKWELL_ULTRA(
        "GB300-NVL72",
        half_tflops=2500,
        fp32_tflops=80,
        fp8_tflops=5000,
        fp4_tflops=15000,
        memory_gb_per_s=8000,
        memory_gib=264.7,
        sheet="Blackwell Ultra, GB300 NVL72, without sparsity",
        remark=(
            "; 18 trays of 4 devices in one NVLink domain, a card of 800 Gbit/s for each device; memory: 288 GB, less "
            "the share that B200's driver keeps"
        ),
        devices_per_host=4,
        domain_hosts=18,
        host_gb_per_s=C2C,
    ),
)
