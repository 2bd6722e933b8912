"""What a process finds on its machine: cores, threads, libraries, proxies."""
