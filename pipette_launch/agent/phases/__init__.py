"""What a node does in each phase of a round: warm-up, trial, standby, first iteration."""
