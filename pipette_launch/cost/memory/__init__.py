"""Peak memory of every pipeline rank, and the bytes that a process holds beside its tensors."""
