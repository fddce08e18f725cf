"""specd: speculative decoding as a gRPC service on MLX."""

from importlib.metadata import version

__version__ = version("specd")
