"""Benchmarks: each prints its conditions and what it measured."""
