"""Stand-ins that follow the documented rules of CUDA, NCCL and NVML, each rule with its source."""
