"""The contract of partitions as data: rows x scenarios x worlds x accumulation x dtypes, and one process as oracle.

rows.py       what is under test: a name, a config fragment, what it sends.  A new tier is one line there.
scenarios.py  what a training run may do: models, losses, incidents.
oracle.py     the same runs in one process, in plain torch.
run.py        the same runs on the engine, on one rank.
theory.py     the messages that a row sends in a step.
"""
