"""T5 and its relatives: encoder-decoder models, which mlx-lm does not have."""
