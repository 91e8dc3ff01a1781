"""The agent of a node: torch's own, measuring before it trains, with ranks and arguments from the plan."""
