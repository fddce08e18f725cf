"""The coordinator: sessions, rounds, and the service for clients. No MLX in here."""
