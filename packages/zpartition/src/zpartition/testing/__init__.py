"""Models and checks for tests of partitions."""

from zpartition.testing.ranks import Net, backward, clip, differing, fingerprint, losses_of, make, norm_of, train

__all__ = ["Net", "backward", "clip", "differing", "fingerprint", "losses_of", "make", "norm_of", "train"]
