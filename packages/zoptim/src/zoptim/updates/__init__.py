"""One step of a parameter group: its plan of kernel calls, and the update without kernels."""
