"""Estimators of others for one given layout, re-derived from their descriptions, for the comparison in `validation`.

Memory: `megatron_formula`, `fujii`, `pipette_mlp`. Step time: `step_times`. What the product itself compares with,
whole planners of others, is in `benchmarks.rivals`.
"""
