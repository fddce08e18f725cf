"""A second draft on trial: it serves a share of the sessions until it is known whether it is better."""
