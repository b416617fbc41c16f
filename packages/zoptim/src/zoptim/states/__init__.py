"""Optimizer states: formats, 8-bit codes, memory, saving and loading."""
