"""Operators of the canonical verifier: one file per operator, with its providers and a plain reference
beside them."""
