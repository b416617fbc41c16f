"""`generate` of an engine: a module's fused path (path.py), and calls in Transformers' style over it."""
