"""vLLM as the fast path."""
