"""Draws the figures and writes docs/performance.md from benchmarks/results: `python -m benchmarks.report`."""
