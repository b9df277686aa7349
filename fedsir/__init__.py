"""Federated training of retinal OCT classifiers under annotation noise."""

__version__ = "0.1.0"
