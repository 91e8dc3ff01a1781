"""What is written of a plan: the plan itself, its prediction, its trials and its outcome."""
