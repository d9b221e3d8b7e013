"""Proving a checkpoint whole: structure, schema, hashes, values."""
