"""Lower bounds of the step time for many layouts at once, as numpy columns."""
