"""Ranks: the peers of a save or load, and the vote on its outcome."""
