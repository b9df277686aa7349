"""Where runs execute: what this machine and a Ray cluster offer."""
