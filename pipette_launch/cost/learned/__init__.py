"""What earlier jobs on the same machines teach about predictions, and how certain a prediction is."""
