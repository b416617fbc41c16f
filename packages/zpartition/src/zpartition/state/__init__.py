"""Optimizer state on shards: rebinding, addresses, unused parameters, optimizers that look at shapes."""
