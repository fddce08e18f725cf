"""Calls that a model must make: its own form of calls as a grammar."""
