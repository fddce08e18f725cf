"""The gateway: an OpenAI-compatible HTTP front end of the coordinator."""
