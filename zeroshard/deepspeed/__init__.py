"""Reads DeepSpeed configs: what each key becomes, and what is written instead of a section."""
