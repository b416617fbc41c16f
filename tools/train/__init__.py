"""The main job: a small GPT learns the Python standard library.  Start reading in main.py."""
