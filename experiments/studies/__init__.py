"""Measurements over many conditions that need no full runs."""
