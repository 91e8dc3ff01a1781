"""A block assignment problem of seats and places, solved without knowing of GPUs."""
