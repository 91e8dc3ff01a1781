"""Bytes that ranks exchange, and the seconds of each exchange."""
