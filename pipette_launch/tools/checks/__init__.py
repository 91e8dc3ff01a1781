"""What `pipette doctor` looks at, one finding after another."""
