"""Estimates of memory, optimizer states and traffic of a layout, before a run; and the ledger of a live partition."""
