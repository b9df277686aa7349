"""What to run: run files, presets and the `fedsir` command."""
