"""Checkpoints that any layout can load: see docs/architecture.md."""
