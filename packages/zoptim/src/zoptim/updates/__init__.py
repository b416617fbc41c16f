"""The step of a parameter group: plans of kernel calls, and the fallback in torch."""
