"""Weights of stage 3: sharded storage, unshard and reshard, and the hooks that call them."""
