"""Our plans against the picks of others: machines, models, and how they are compared."""
