"""Processes of this node and of others that help with a search."""
