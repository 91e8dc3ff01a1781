"""What a node reads from the output of a training."""
