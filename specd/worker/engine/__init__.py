"""The thread that owns MLX, and the schedule of its steps."""
