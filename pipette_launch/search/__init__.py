"""Find the layout and the placement with the least step time among those that fit in memory."""
