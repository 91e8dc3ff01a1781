"""The defaults of our flags; everything that needs one imports it from here."""

MARGIN = 0.02
"""`--pipette-margin` and `--margin`: the part of the step that another plan than the user's own must save."""
MEMORY_MARGIN = 0.08
"""`--pipette-memory-margin` and `--memory-margin`: the part of the device's memory that a plan leaves free."""
WARMUP_BUDGET_S = 60.0
"""`--pipette-budget`: seconds that a warm-up may measure."""
SEARCH_BUDGET_S = 10.0
"""`--budget` of `pipette plan` and `pipette compare`: processor seconds of the search."""
TRIALS = 0
"""`--pipette-trials`: how many plans run briefly beside the user's own configuration before the training."""
TRIAL_ITERS = 5
"""`--pipette-trial-iters`: how many step times of each trial count."""
WATCH_LIMIT = 0.3
"""`--pipette-watch-limit`: by which fraction the steps of a training may become longer."""
SEED = 0
"""`--seed` of `pipette plan` and `pipette compare`, and of the launcher's own search."""
