"""Sessions' KV caches, and the room that they share."""
