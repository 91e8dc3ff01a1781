"""Execute pipeline schedules that Megatron lacks, on megatron-core as it is."""
