"""Megatron's constraints on a job's flags and on a layout, for the planner and for `predict`."""
