"""DeepSpeed configs: the translation of each key, and the lines to write in place of a section."""
