"""Wrappers around a module's forward: compilation, recomputation, other methods."""
