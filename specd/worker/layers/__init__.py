"""The caches of a network's layers for one session: an implementation for each kind, and one noun for all of them."""
