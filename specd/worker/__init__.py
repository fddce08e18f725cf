"""What both workers are made of. The only place, with the two workers, that imports MLX."""
