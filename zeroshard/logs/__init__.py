"""Metrics of training steps, sent to the terminal, files and other people's trackers."""
