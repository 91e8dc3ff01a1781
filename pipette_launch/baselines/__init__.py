"""Planners of others, re-derived from their descriptions, for `pipette compare --planners`.

`planners.RANKINGS` has one signature for all; `placers.PLACERS` has the orders of RANKs alone, for any layout.
"""
