"""The canonical step on NVIDIA GPUs."""
