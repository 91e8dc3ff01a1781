"""The plan of a job: made from measurements, kept, or fitted to the hosts that are left."""
