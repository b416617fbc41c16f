"""Saving: plan who writes what, write it, commit it by one rename; retention and background saves."""
