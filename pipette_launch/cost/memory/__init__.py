"""Peak memory of every pipeline rank, and what a process holds beside its tensors."""
