"""Seconds of a stage's compute, from measured layers or from the model of a device."""
