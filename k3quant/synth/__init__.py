"""Checkpoints of any config with true headers, made of holes or of seeded values."""
