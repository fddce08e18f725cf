"""`specd bench`: specd against its own target alone, and against mlx-lm in process, in one run."""
