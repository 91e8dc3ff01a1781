"""What processes of one job tell each other."""
