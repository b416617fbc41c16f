"""Contract of partitions as data: rows x scenarios x worlds x accumulation x dtypes, and an oracle.

rows.py       configurations under test: name, config fragment, predicted messages.  A new tier is one line.
scenarios.py  training runs: models, losses, incidents.
oracle.py     the same runs in one process, in plain torch.
run.py        the same runs on the engine, as one rank sees them.
theory.py     the messages that a row sends in a step.
"""
