"""Grammars over tokens: the ones that may come next in a text that must keep a form (llguidance)."""
