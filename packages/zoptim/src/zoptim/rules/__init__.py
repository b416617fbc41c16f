"""Update rules: pure functions, the reference of the kernels."""
