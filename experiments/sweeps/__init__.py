"""`fedsir sweep`: grids of runs."""
