"""Trainers of other libraries over an engine."""
