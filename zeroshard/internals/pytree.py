"""Torch's trees of containers. The versions of torch that are supported have no public name for them.

tests/distributed/test_parity.py and tests/sharding/test_deferred.py notice a change.
"""

from __future__ import annotations

from torch.utils._pytree import (
    tree_flatten,
    tree_is_leaf,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

__all__ = ["tree_flatten", "tree_is_leaf", "tree_leaves", "tree_map_only", "tree_unflatten"]
