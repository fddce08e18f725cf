"""Metrics, statistics and spans of rounds and sessions."""
