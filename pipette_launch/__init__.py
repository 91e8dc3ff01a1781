"""Measure the machines of a Megatron-LM job, choose its parallel configuration, and launch it."""

__version__ = "0.1.0"
