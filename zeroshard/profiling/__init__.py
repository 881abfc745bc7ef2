"""Profiles: the time of steps by kind and by unit."""
