"""The coordinator's access to the two workers."""
