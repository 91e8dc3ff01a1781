"""The user's own layers on one device, with no peer."""
