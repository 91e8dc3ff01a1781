"""Peak memory of every pipeline rank, and the bytes that a training process holds beside its tensors."""
