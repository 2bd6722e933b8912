"""`python -m llm42` is the `llm42` command."""

from llm42.cli.main import main

main()
