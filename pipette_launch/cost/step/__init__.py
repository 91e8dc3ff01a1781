"""The step time of a layout on given slots."""
