"""The grammar of configs: kinds of values, sources, errors and suggestions."""
