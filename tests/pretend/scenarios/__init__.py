"""All scenarios: importing this package makes them known."""

from importlib import import_module
from pkgutil import iter_modules

from tests.pretend.scenario import SCENARIOS

for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)

__all__ = ["SCENARIOS"]
