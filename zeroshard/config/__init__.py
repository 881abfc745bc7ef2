"""The settings of an engine."""
