"""Text: tokens and back, chat templates, stop strings."""
