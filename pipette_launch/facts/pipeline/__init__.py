"""Programs of pipeline ranks: passes, sends and receives in turn."""
