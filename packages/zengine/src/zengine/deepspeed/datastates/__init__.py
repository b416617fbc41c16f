"""`deepspeed.datastates`: the section of its settings; zckpt writes checkpoints, also in the background."""
