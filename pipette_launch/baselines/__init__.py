"""Estimators and planners of others, re-derived from their descriptions, for comparison with ours.

Memory: `megatron_formula`, `fujii`, `pipette_mlp`. Latency, each with `step_time_s(job, layout, measurements,
placement=None)`: `amp`, `varuna`, `pipette_latency` (whose `amp_arm_s` is the AMP of Pipette's code). Whole planners:
`planners.PLANNERS`, one signature for all; orders of ranks for any layout: `placers.PLACERS`.
"""
