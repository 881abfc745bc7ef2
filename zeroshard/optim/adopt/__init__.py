"""Optimizers of other packages, which an engine takes over."""
