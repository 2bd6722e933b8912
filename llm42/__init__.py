"""LLM-42: deterministic LLM serving by decoding fast, verifying under a fixed reduction schedule, and rolling back."""

__version__ = "0.1.0"
