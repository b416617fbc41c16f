"""Offload: states, gradients and weights on the host and on disk."""
