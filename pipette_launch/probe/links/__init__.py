"""Latency and bandwidth of links, and the time of collectives."""
