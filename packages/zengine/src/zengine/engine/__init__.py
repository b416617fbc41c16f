"""Training loop: engine, clock, parts, runners, loss weighting, non-finite gradients, feature base."""
