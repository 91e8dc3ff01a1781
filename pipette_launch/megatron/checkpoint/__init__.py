"""What a saved checkpoint says, and what it pins."""
