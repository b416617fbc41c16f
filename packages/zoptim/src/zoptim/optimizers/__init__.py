"""The optimizers: subclasses of torch.optim.Optimizer over one contract."""
