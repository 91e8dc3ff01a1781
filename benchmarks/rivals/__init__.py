"""Planners of other projects, rewritten from their code and papers, to compare ours with.

`planners.RANKINGS` has one signature for all; `placers.PLACERS` has rank orders alone, for any layout.
"""
