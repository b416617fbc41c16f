"""Reading: from JSON, dicts and objects to a checked config."""
