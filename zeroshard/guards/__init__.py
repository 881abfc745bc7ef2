"""Refuses what a user may do to a sharded model that would be lost in silence."""
