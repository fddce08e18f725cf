"""Identities: certificates with their roles, and the tokens of clients."""
