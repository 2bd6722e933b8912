"""A model's files as a whole: described, loaded, downloaded."""
