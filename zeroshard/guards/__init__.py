"""Errors for edits of a sharded model that would be lost in silence."""
