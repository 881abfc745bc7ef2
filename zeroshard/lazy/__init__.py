"""Models without memory: tensors whose values are read or computed later."""
