"""The streaming executor and its metrics."""
