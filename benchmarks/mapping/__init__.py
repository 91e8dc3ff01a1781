"""Fabrics and a plain placer of hosts, on which bench_probing compares ways to choose the links to measure."""
