"""All ranks find the store of the watchdog, which rank 0 holds, on one machine and on several."""

import warnings

import pytest
import torch
import torch.distributed as dist

from zeroshard.comm.collectives import Axis
from zeroshard.comm.counter import Counter
from zeroshard.comm.watch import watchdog


def open_on_hosts(loopbacks, master, timeout_s):
    """The address of the store, and the warnings; ranks have loopbacks of these names."""
    rank, size = dist.get_rank(), dist.get_world_size()
    axis = Axis(dist.group.WORLD, device=torch.device("cpu"), counter=Counter(), timeout_s=timeout_s)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(watchdog, "_loopback", lambda: loopbacks[rank])
        patch.setenv("MASTER_ADDR", master)
        opened = watchdog.open_watchdog(rank, size, axis.all_gather_object, timeout_s, None)
    return None if opened is None else opened._store.host, [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("other", "address"),
    [
        (["host", "boot", "net:[1]"], "127.0.0.1"),
        (["other", "boot", "net:[1]"], "127.0.0.2"),
        (["host", "other boot", "net:[1]"], "127.0.0.2"),
        (["host", "boot", "net:[2]"], "127.0.0.2"),
    ],
)
def test_ranks_of_another_machine_or_network_use_the_address_of_the_master(ranks, other, address):
    own = ["host", "boot", "net:[1]"]
    (_, said), (found, _) = ranks(2, open_on_hosts, [own, other], "127.0.0.2", 20.0)
    assert found == address
    assert not said


@pytest.mark.long
def test_where_rank_0_is_out_of_reach_all_ranks_go_on_without_a_watchdog(ranks):
    """The others wait for the one that tries no longer than they wait in any collective."""
    for found, said in ranks(2, open_on_hosts, [["one"], ["other"]], "240.0.0.1", 20.0):
        assert found is None
        assert said[0].startswith("zeroshard runs without its watchdog: rank 1 cannot reach rank 0 at ")


def test_a_process_tells_its_machine_and_its_network():
    assert watchdog._loopback() == watchdog._loopback()
    assert all(watchdog._loopback())
