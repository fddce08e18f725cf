"""The parts that both workers share. Only this package and the two workers import MLX."""
