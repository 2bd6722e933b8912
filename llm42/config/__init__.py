"""The one typed configuration tree."""
