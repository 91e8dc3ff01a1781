"""Several hosts on one Linux machine: network namespaces joined by links whose rates a file sets.

`python -m benchmarks.netlab --help`, and docs/netlab.md. Needs root, iproute2 and, to read files, Python 3.11.
"""

from benchmarks.netlab.lab import Lab
from benchmarks.netlab.system import LabError, missing
from benchmarks.netlab.topology import Host, Path, Topology, TopologyError

__all__ = ["Host", "Lab", "LabError", "Path", "Topology", "TopologyError", "missing"]
