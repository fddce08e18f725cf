"""The sources of draft tokens."""
