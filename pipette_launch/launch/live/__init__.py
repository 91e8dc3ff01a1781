"""Watches a job from the files that its launcher writes; only reads."""
