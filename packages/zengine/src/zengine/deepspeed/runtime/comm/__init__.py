"""`deepspeed.runtime.comm`."""
