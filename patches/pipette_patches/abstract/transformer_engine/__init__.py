"""A stand-in for Transformer Engine that makes and keeps the tensors that its kernels make and keep."""
