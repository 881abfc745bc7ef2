"""Profiles: the time and the memory of steps by phase and by unit."""
