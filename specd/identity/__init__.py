"""Who is who: certificates and their roles, and the tokens of clients."""
