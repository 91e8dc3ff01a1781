"""Devices of a host, their condition, and faults of hosts, devices and links."""
