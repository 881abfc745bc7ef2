"""Batches: the loader, and micro-batches."""
