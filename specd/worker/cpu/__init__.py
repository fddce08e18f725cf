"""Faster forms of the layers of a network, for the CPU backend of MLX. `optimize` is the only way in."""
