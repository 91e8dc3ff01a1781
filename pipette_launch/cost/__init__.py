"""Prediction of the seconds of one training step and the bytes on each device, for a layout on given slots."""
