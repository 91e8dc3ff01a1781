"""Finds the layout and the rank placement with the least step time, among layouts that fit in memory."""
