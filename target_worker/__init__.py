"""The target worker: verifies proposals."""
