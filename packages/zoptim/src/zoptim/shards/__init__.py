"""Shards of the optimizers that need whole tensors: LAMB, Muon, Adafactor."""
