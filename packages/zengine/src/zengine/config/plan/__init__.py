"""Plan: a config resolved for a world of ranks."""
