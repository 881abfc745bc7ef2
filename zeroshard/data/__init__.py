"""Batches: the loaders, and micro-batches."""
