"""HTTP itself: bodies, errors, events, and who may ask."""
