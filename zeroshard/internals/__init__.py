"""The private sides of torch and of objects: graphs, transforms, trees, the values inside objects.

The versions of torch that are supported have no public name for its trees of containers:
tests/sharding/test_outputs.py and tests/lazy/test_deferred.py notice a change.
"""

from torch.utils import _pytree as pytree

__all__ = ["pytree"]
