"""A block assignment problem of seats and places, solved independently of GPUs."""
