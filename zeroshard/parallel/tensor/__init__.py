"""Layers whose parts are computed by the ranks of a tensor group."""
