"""The user's optimizer: taken over, clipped."""
