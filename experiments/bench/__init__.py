"""Measures what a federated run costs beside what cannot be avoided."""
