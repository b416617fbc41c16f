"""Collectives of CPU ranks through memory that the ranks of a host share, an order of magnitude faster than Gloo.

`zcomm`'s verbs take this way by themselves: `registry.issue` answers None where it is not open, and Gloo does the
work.  ZCOMM_TRANSPORT=auto|shared|gloo chooses; `zcomm.shared_empty` makes tensors that need no copies.

    names        numbers of operations and data types        segment      memory without a name
    native       loads the C extension                       handshake    the ranks decide together
    transport    calls into C, waits, failures as errors     failure      failures in words
    registry     process group -> transport                  tensors      shared_empty

Ranks on several hosts go in two levels, through memory inside a host and over Gloo between hosts:

    places       who is where, whether that fits             network      the ranks of one index on all hosts
    levels       the steps of each collective                lane         one after the other, in the order of issue
    hierarchy    the transport made of these
"""
