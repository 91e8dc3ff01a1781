"""Pipeline schedules and how long a pipeline of given pass times takes under them."""
