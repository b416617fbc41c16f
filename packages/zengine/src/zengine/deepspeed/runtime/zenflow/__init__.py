"""`deepspeed.runtime.zenflow`."""
