"""Loading, checking and calibrating a model."""
