"""The models that a coordinator serves: their names, and when the workers of each are loaded."""
