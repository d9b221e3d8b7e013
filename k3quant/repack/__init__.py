"""Change a checkpoint's layout without changing a bit of its tensors."""
