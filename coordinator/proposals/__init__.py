"""Where the tokens of a proposal come from: the draft model, and look-up in the session's own text."""
