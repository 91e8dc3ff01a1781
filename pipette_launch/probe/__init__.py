"""Short benchmarks on every slot of the job."""
