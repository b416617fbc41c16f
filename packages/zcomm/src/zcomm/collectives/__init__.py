"""Collectives over torch's groups: flat, quantized, sparse and ragged, with handles and traces."""
