"""Estimators of others for one given layout, re-derived from their descriptions, for the comparison in `validation`.

Memory: `megatron_formula`, `fujii`, `pipette_mlp`. Step time: `step_times`. Whole planners of
others are in `benchmarks.rivals`.
"""
