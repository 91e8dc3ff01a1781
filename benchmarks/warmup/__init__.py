"""Real warm-ups on laboratories of known links, and what they make of them."""
