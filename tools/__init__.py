"""Programs that write parts of the source: `make client`."""
