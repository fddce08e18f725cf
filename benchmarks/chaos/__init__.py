"""Faults at random moments, and what becomes of the texts."""
