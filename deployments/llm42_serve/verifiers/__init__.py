"""Verifiers as plain, named, detached actors, and who watches over them."""
