"""Hosts, devices and links."""
