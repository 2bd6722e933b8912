"""The service on Ray Serve."""
