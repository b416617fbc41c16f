"""File formats of others as bytes by name: torch's zip files, and GGUF.  Safetensors has a library of its own.

Files are mapped, so a tensor is a view and only the pages that are accessed are read.  A reader trusts nothing that a
file says of itself: every count, name and offset is checked before it is used.
"""
