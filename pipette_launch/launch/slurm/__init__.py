"""What a SLURM job step says of itself, in the place of torchrun's flags for nodes and rendezvous."""
