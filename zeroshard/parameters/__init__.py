"""The parameters of a sharded model: sharded, unsharded and original ones, and the calls that they refuse."""
