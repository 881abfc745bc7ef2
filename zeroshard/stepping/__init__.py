"""The step of an optimizer, and everything around it."""
