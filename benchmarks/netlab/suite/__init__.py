"""The whole product against torchrun on networks that are really uneven: one table, raw figures beside it."""
