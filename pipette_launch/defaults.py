"""Defaults of flags, and limits that several packages share."""

MARGIN = 0.02
"""`--pipette-margin`, `--margin`: share of the step time that another plan than the user's must save."""
MEMORY_MARGIN = 0.08
"""`--pipette-memory-margin`, `--memory-margin`: share of the device's memory that a plan leaves free."""
WARMUP_BUDGET_S = 60.0
"""`--pipette-budget`: seconds that a warm-up may measure."""
SEARCH_BUDGET_S = 10.0
"""`--budget` of `pipette plan`, and the launcher's own search: processor seconds."""
TRIALS = 0
"""`--pipette-trials`: plans that run briefly beside the user's own configuration before the training."""
TRIAL_ITERS = 5
"""`--pipette-trial-iters`: step times of each trial that count."""
WATCH_LIMIT = 0.3
"""`--pipette-watch-limit`: relative slowdown of the steps at which the launcher prints a warning."""
SEED = 0
"""`--seed` of `pipette plan`, and of the launcher's own search."""
HOST_SILENCE_S = 8.0
"""A host that has not answered for this time counts as lost."""
