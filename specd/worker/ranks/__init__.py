"""A target in several processes or on several machines: its ranks, which compute each step together."""
