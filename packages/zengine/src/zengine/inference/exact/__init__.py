"""Exact agreement of training and generation: logits of a token that depend on nothing but weights and tokens before.

Modules, low first: products (whose rows do not depend on others), operators, attention, blocks, modules (what stands
on the user's), choices (roundings of the embedding and the head), steps (generation over a cache), forward (install).
"""
