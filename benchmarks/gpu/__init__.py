"""The GPU check: what only a CUDA device can prove, run part by part within minutes (`scripts/gpu-check`).

The same parts run on a CPU at toy size, so that the check itself cannot rot where there is no GPU.
"""
