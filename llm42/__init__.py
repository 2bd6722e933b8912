"""LLM-42: deterministic LLM serving: decode fast, verify under a fixed reduction schedule, roll back."""

__version__ = "0.1.0"
