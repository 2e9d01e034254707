"""Hold a kernel against the float64 oracle."""
