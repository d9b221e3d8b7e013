"""Changing precision: planned from headers, streamed in units, proven by reading back."""
