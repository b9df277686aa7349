"""The record of runs: fedsir events written to an MLflow store."""
