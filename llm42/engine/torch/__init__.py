"""Our own continuous batching on ordinary kernels."""
