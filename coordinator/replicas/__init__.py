"""The target workers that share the sessions, and the choice of one for each session."""
