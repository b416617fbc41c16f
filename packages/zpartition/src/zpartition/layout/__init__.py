"""Layouts, policies, units, addresses and ranks: pure values, computed once for a model and a policy."""
