"""What a host brings to the job, and what is amiss with it."""
