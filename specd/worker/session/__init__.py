"""Sessions' streams and KV caches, and the memory that they share."""
