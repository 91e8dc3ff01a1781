"""The patch `cpu_backend`: stock megatron-core on CPUs over gloo."""
