"""Gradients: buckets, reduction, sparse rows, speculative steps."""
