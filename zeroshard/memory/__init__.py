"""Bytes: measured and estimated."""
