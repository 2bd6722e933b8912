"""The HTTP side: CPUs only, in front of the replicas."""
