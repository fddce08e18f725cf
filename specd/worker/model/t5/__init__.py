"""T5, v1.1, FLAN, mT5 and UL2: encoder-decoder models, which mlx-lm does not have."""
