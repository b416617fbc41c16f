"""`deepspeed.runtime.swap_tensor`: the settings of file I/O; zpartition moves tensors to files."""
