"""DeepSpeed: the translation of its configs."""
