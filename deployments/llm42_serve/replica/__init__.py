"""One engine, and the verifiers as it sees them."""
