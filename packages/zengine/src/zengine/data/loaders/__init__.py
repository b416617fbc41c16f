"""Loaders: batches with a position that can be saved."""
