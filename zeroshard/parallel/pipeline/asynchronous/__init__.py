"""Asynchronous pipelines: lists with steps in the middle, and the weights that each action computes with."""
