"""The plan: what a config means on a world of ranks."""
