"""Keys of a config: one row each, by section."""
