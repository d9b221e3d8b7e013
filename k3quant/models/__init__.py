"""What Kimi-K3 is: its config, its table of tensors, its blocks as functions of tensors."""
