"""Cost of the parts of a model on one rank: parameters, kept activations, work for the device, and exchanges."""
