"""Orders that need more than the number of samples."""
