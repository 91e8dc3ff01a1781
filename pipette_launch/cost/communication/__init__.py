"""Which ranks exchange how many bytes, and how many seconds an exchange takes."""
