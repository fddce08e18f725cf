"""Messages of the protocol, errors of calls, and conversations, as plain values."""
