"""A whole LLM-42 in one process, without Ray."""
