"""The pieces: each function takes an `acceptance.bench.Bench` and states what it finds there."""
