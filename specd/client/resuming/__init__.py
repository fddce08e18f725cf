"""Generations and sessions that go on where they were, after whatever broke."""
