"""Heads: small networks in the target worker that draft from the target's own hidden states."""
