"""What is amiss with a machine."""
