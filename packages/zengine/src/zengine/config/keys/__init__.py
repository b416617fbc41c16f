"""The keys: what may be written in a config."""
