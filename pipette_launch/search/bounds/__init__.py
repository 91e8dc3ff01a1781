"""Lower bounds of the step time over all placements of a layout."""
