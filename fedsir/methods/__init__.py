"""Training methods, one file each; see `registry` for the names."""
