"""Hangs and failures: fingerprints of calls, the observer interface, a side channel, the hang detector, and abort."""
