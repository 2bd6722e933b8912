"""A long run of the whole service on one machine: does anything grow that should not?"""
