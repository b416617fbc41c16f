"""Sources of tensors: modules, optimizers and DTensors as shards."""
