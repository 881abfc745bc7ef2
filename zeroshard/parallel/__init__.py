"""Parallelism inside the model: parts of layers, and runs of layers."""
