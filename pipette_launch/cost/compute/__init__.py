"""Seconds that a stage computes, from measured layers or from the model of a device."""
