"""gRPC and /metrics: what the three processes share."""
