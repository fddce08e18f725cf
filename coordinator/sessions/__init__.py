"""Requests, their prompts, admission, and the sessions that are kept."""
