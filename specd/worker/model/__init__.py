"""Loads and calibrates a model."""
