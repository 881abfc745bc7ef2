"""DeepSpeed: the translation of its configs, and its engine's names."""
