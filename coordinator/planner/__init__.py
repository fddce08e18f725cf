"""Chooses the number of draft tokens of each round."""
