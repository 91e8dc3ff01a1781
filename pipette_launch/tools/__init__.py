"""The command `pipette`: the launcher's parts one by one, on any machine."""
