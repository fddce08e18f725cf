"""The caches of a network's layers for one session: one class for each kind of cache, and `SessionLayers` for all."""
