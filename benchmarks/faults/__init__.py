"""Faults injected into trainings on laboratory hosts, and what became of them."""
