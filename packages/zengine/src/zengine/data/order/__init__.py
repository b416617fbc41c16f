"""Orders: which sample goes where. Pure arithmetic."""
