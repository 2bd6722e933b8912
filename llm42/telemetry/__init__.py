"""What the service says of itself: metrics, logs, traces."""
