"""Defaults of flags, and limits that several packages share."""

MARGIN = 0.02
"""`--pipette-margin`, `--margin`: share of the step time that a plan must save to replace the user's configuration."""
MEMORY_MARGIN = 0.08
"""`--pipette-memory-margin`, `--memory-margin`: share of the device's memory that a plan leaves free."""
WARMUP_BUDGET_S = 60.0
"""`--pipette-budget`: longest duration of a warm-up's measurements in seconds."""
LINKS_BUDGET_S = 10.0
"""Longest duration in seconds of a warm-up that measures only links, for a job that cannot be planned."""
SEARCH_BUDGET_S = 10.0
"""Longest search for a plan in processor seconds: `--budget` of `pipette plan`, and the launcher's own search."""
TRIALS = 0
"""`--pipette-trials`: number of plans to try before the training, besides the user's own configuration."""
TRIAL_ITERS = 5
"""`--pipette-trial-iters`: number of step times of each trial that enter the comparison."""
TOLERATE = 1
"""`--pipette-tolerate`: number of lost nodes to plan for, if --nnodes MIN:MAX allows the loss of a node."""
SPARES = 0
"""`--pipette-spares`: number of further nodes that are measured and then wait to replace lost nodes."""
WATCH_LIMIT = 0.3
"""`--pipette-watch-limit`: relative slowdown of training steps at which the launcher prints a warning."""
SEED = 0
"""`--seed` of `pipette plan`, and of the launcher's own search."""
HOST_SILENCE_S = 8.0
"""Seconds without an answer after which a host counts as lost."""
