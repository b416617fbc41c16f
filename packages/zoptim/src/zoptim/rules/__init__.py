"""Update rules: pure functions, the reference for every kernel."""
