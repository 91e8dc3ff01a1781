"""Every layout that Megatron allows for a job."""
