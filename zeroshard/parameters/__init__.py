"""The parameters of a sharded model: sharded, unsharded and original ones, and what they refuse."""
