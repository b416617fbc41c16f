"""Main job: train a small GPT on the Python standard library.  Entry point: main.py."""
