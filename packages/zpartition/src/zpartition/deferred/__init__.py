"""Deferred initialization: `Init` records operations, `shard` replays them one tensor at a time."""
