"""Shared-memory transport: collectives of CPU ranks on one host, an order of magnitude faster than Gloo.

`zcomm`'s collectives use it automatically: `registry.issue` returns None where it is not available, and Gloo does the
work.  ZCOMM_TRANSPORT=auto|shared|gloo selects; `zcomm.shared_empty` makes tensors that need no copies.

    native       the C extension and its numbers             segment      anonymous shared memory
    transport    calls into C, waits, errors                 handshake    the ranks negotiate
    registry     process group -> transport                  failure      error messages

Groups with ranks on several hosts use two levels, shared memory inside a host and Gloo between hosts:

    host_layout  ranks by host                               network      Gloo between ranks of equal index
    levels       the steps of each collective                task_queue   runs them in the order of issue
    hierarchy    the transport made of these
"""
