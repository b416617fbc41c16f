"""Optimizers whose update needs a whole tensor (LAMB, Muon, Adafactor), on shards of it."""
