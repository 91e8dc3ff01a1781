"""Benchmarks: each prints its conditions and its measurements."""
