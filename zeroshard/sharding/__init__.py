"""The core: parameters are gathered and freed, gradients are reduced, each rank keeps its shard."""
