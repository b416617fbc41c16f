"""Order check: the ranks of a large run are played one by one in this process, and their collectives compared.

`check.py` is the whole; a rank is played by `play.py`, on tensors whose values nobody computes (`unknown.py`), with
answers to every question about values from `decisions.py`; `ranks.py` chooses the ranks; `compare.py` compares them.
"""
