"""Benchmark of specd, its target alone, and mlx-lm in process, in one run."""
