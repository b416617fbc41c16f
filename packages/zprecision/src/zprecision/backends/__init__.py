"""The C kernels: loading, instruction sets, threads."""
