"""What the layers of a model hold on one rank: parameters, kept activations and optimizer state."""
