"""Kimi-K3 checkpoints: fetch, prove, relayout, requantize, measure."""

__version__ = "0.1.0"
