"""Which rank sits on which slot."""
