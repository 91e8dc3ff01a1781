"""Megatron's command line read into facts, and facts written back."""
