"""Times and memory of the user's own layers, and the speed of each slot."""
