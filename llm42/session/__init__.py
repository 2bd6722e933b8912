"""Decode, verify, roll back: the state machine of a request, and its driver."""
