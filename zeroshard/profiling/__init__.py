"""Where the time and the memory of steps go, by phase and by unit."""
