"""`deepspeed.runtime.fp16`: import its modules by name."""
