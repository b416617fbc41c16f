"""Loading: select a checkpoint, check its manifest, plan the reads, copy into live tensors; verify and compare."""
