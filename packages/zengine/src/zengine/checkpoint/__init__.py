"""Checkpoints of an engine: save, load, restore, export."""
