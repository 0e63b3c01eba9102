"""What the collection costs and gains, always as a ratio against a named baseline measured in the same run."""
