"""Failures that users of inference servers reported, as small checks against any OpenAI endpoint."""
