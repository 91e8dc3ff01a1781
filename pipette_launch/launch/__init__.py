"""The story of a job in one screen: read it, measure, solve, show, run, and what to do when a step fails."""
