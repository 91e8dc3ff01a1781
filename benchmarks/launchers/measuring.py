"""Draw the measurements of a described network: `python -m benchmarks.launchers.measuring ORDER`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.plan_machines import SEED, drawn_links
from pipette_launch.cost.compute.device_model import imagined
from pipette_launch.facts import files
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.devices import device_named
from pipette_launch.facts.measurements import LinkSurvey, layers_digest
from pipette_launch.probe.messages import WarmupOrder
from pipette_launch.search.layouts import base_layouts


def main(path: str) -> None:
    """Write what the workers of a warm-up would have measured."""
    order = files.read(Path(path), WarmupOrder)
    assert order.job is not None
    size = len(order.hosts)
    found = base_layouts(order.job, world_size=size, domains=Domains(devices_per_host=1), device_kind="cpu")
    layouts = [found.columns.layout(index) for index in range(len(found))]
    equal = imagined(order.job, device_named("A100-80GB"), num_hosts=size, devices_per_host=1, layouts=layouts)
    links = drawn_links(equal.cluster.between_hosts, np.random.default_rng(SEED))
    survey = LinkSurvey(
        spread_HH=np.where(np.eye(size, dtype=bool), 0.0, 0.02),
        origin_HH=tuple("m" * row + "-" + "m" * (size - row - 1) for row in range(size)),
    )
    cluster = replace(equal.cluster, hosts=order.hosts, imagined=None, between_hosts=links)
    digest = layers_digest(order.job.model)
    files.write(Path(order.output), replace(equal, cluster=cluster, survey=survey, model_digest=digest))


if __name__ == "__main__":
    main(sys.argv[1])
