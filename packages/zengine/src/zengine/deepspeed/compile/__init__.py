"""`deepspeed.compile`: the section of its settings; `engine.compile` and torch.compile compile."""
