"""Stored answers, held against the verifier."""
