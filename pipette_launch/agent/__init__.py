"""The agent of a node: torch's agent, which measures the machines before training and takes ranks from the plan."""
