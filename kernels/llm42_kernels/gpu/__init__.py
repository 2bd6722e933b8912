"""Triton bodies of the CUDA providers. Nothing here is imported until a CUDA (or interpreted) provider is
called."""
