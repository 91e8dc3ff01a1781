"""A block assignment problem: seats (sets of ranks) are assigned to places (hosts). The solver knows no GPUs."""
