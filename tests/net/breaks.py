"""All breaks, by what they break."""

from __future__ import annotations

from tests.net.exchanges import EXCHANGES
from tests.net.guards import GUARDS
from tests.net.orders import ORDERS
from tests.net.plans import PLANS
from tests.net.roundings import ROUNDINGS

BREAKS = (*EXCHANGES, *ROUNDINGS, *ORDERS, *GUARDS, *PLANS)
