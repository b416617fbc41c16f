"""Optimizer states: their formats and codes, their memory, and how they are saved and loaded."""
