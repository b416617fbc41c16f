"""The loop: engine, clock, parts, runners, loss weighting, non-finite gradients, features."""
