"""Weights from files to a device: chunks, read by threads, copied while the device computes."""
