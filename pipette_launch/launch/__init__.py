"""Launch of a job: read it, measure its hosts, choose a plan, show and run the plan, and react to failures."""
