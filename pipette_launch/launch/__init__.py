"""Steps of a launch: read the job, measure the hosts, choose a plan, show and run the plan, react to failures."""
