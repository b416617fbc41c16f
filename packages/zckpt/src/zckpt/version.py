"""The version of this package, apart from `__init__` so that inner modules can read it."""

__version__ = "0.1.0"
