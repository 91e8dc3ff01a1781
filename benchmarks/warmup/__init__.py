"""Runs real warm-ups on virtual hosts with known links, and compares the results."""
