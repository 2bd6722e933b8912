"""The canonical step on CPUs."""
