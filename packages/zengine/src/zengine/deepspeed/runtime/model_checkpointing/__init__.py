"""`deepspeed.runtime.model_checkpointing`: the settings of checkpoints; zckpt writes them."""
