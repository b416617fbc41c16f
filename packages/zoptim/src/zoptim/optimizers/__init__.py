"""The optimizers: subclasses of torch.optim.Optimizer."""
