"""Tensors of a partition: single parameters, gathered weights, loading from files, full tensors."""
