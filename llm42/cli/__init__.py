"""The `llm42` command."""
