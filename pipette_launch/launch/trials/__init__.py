"""Plans that run for a few iterations before the training begins, and which of them wins."""
