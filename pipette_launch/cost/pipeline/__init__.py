"""Pipeline schedules, and the time of a pipeline with given pass times under each schedule."""
