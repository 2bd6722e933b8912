"""Which providers are row-invariant here, and the plants that show the checks can fail."""
