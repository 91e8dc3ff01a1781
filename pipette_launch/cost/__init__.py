"""What a layout costs: bytes per stage, seconds per step."""
