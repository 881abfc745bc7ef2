"""Try a training run over several hosts on one machine: each host is a network namespace of Linux.

    python examples/launch/hosts.py                                     # 2 hosts, with one rank each
    python examples/launch/hosts.py --cut-at 6                          # the last host loses its network
    python examples/launch/hosts.py --kill-at 6 --host 0                # the first host goes down
    python examples/launch/hosts.py --hosts 3 --script train.py --steps 100

Each host has a network card of its own, with a cable to a switch, and starts `torchrun.sh`, as those of a
cluster do. With --cut-at the cable of a host is pulled once a checkpoint of this step is there, and with
--kill-at all processes of a host are killed; --away seconds later the host is back. A cut that is shorter
than `watchdog_s` of the config is a pause. After a longer one the ranks end with an error; all start again
once the host is back, and go on from the newest checkpoint.

It needs Linux with `unshare`, `nsenter` and `ip` (util-linux, iproute2), but no root: all of it is in
namespaces of this user, which end with it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1]
INSIDE = "ZEROSHARD_HOSTS_INSIDE"
"""Set in the environment of this script once it runs in namespaces of its own."""
TOOLS = ("unshare", "nsenter", "ip")
WAYS = (["unshare", "--map-root-user", "--net"], ["unshare", "--net"])
"""Commands that start another one in a network of its own: for any user, and for root without namespaces of
users."""
TRY = ["ip", "link", "add", "switch", "type", "bridge"]
PORT = 29500
WATCHDOG_S = 10
"""Seconds; ranks of a busy machine may start so far apart."""
RDZV_CONF = "read_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"
"""Notices a host that is gone within seconds; torchrun's defaults are for larger networks."""
SMALL = ["--hidden", "32", "--layers", "2", "--seq-len", "32", "--batch-size", "2", "--eval-every", "1000"]


# ------------------------------------------------------------------------------------------------ network


def way_inside() -> list[str]:
    """Return the command that starts another one in a network of its own.

    Raises:
        OSError: there is none on this system.
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise OSError(f"expected Linux with the commands {', '.join(TOOLS)}; missing: {', '.join(missing)}")
    said = []
    for way in WAYS:
        ended = subprocess.run([*way, *TRY], capture_output=True, text=True, check=False)
        if ended.returncode == 0:
            return way
        said.append(f"{' '.join(way)}: {ended.stderr.strip()}")
    raise OSError(
        "expected a system that lets this user make network namespaces and a bridge in them (or root), got: "
        + "; ".join(said)
    )


def ip(*arguments: str, inside: int | None = None) -> None:
    """Call `ip` in the switch's network, or in that of a process."""
    enter = [] if inside is None else ["nsenter", f"--net=/proc/{inside}/ns/net"]
    subprocess.run([*enter, "ip", *arguments], check=True)


def network_of(pid: int | str) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


class Host:
    """A network namespace with a card `eth0`, whose cable leads to the switch; the processes in it."""

    def __init__(self, number: int) -> None:
        self.address = f"10.0.0.{number + 1}"
        self._cable = f"cable{number}"
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        while network_of(self._holder.pid) == network_of("self"):
            time.sleep(0.01)
        self._network = network_of(self._holder.pid)
        pid = self._holder.pid
        ip("link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        ip("link", "set", self._cable, "master", "switch", "up")
        ip("address", "add", f"{self.address}/24", "dev", "eth0", inside=pid)
        for card in ("eth0", "lo"):
            ip("link", "set", card, "up", inside=pid)

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        """Start a command on this host."""
        enter = ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--"]
        self._run = subprocess.Popen([*enter, *command], env=environment)

    def poll(self) -> int | None:
        """Return the exit status of the command; None while it runs."""
        return self._run.poll()

    def set_cable(self, *, plugged: bool) -> None:
        """Plug in the cable to the switch, or pull it."""
        ip("link", "set", self._cable, "up" if plugged else "down")

    def kill(self, *, with_network: bool = False) -> None:
        """Kill all processes on this host at once."""
        while pids := [pid for pid in self._processes() if with_network or pid != self._holder.pid]:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in (self._holder, getattr(self, "_run", None)):
                if process is not None and process.pid in pids:
                    process.wait()
            time.sleep(0.01)

    def _processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):  # it has just ended, or is another user's
                if entry.name.isdigit() and network_of(entry.name) == self._network:
                    found.append(int(entry.name))
        return found


# --------------------------------------------------------------------------------------------------- run


def start(host: Host, head: Host, args: argparse.Namespace) -> None:
    """Start torchrun.sh on a host."""
    config = args.folder / "config.json"
    config.write_text(json.dumps({"watchdog_s": WATCHDOG_S, "micro_batch_size": 2}))
    own = {"HEAD": head.address, "ADDRESS": host.address, "PORT": str(PORT), "RDZV_CONF": RDZV_CONF}
    own |= {"HOSTS": str(args.hosts), "NPROC": str(args.nproc), "OMP_NUM_THREADS": "1"}
    own |= {"GLOO_SOCKET_IFNAME": "eth0", "PYTHON": os.environ.get("PYTHON", sys.executable)}
    script = [str(EXAMPLES / "finetune.py"), *SMALL, "--plot", str(args.folder / "loss.png")]
    if args.script is not None:
        script = [str(args.script)]
    script += ["--config", str(config), "--steps", str(args.steps), "--save-every", "2"]
    script += ["--checkpoint-dir", str(args.folder / "checkpoints"), "--resume", "auto"]
    host.start(["bash", str(EXAMPLES / "launch" / "torchrun.sh"), *script], os.environ | own)


def newest(folder: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    latest = folder / "checkpoints" / "latest"
    return int(latest.read_text().split("-")[-1]) if latest.is_file() else 0


def say(line: str) -> None:
    print(f"hosts.py: {line}", flush=True)


def lose(host: Host, head: Host, args: argparse.Namespace) -> None:
    """Cut a host off from the others or kill it, and bring it back."""
    if args.cut_at:
        host.set_cable(plugged=False)
        say(f"the network of host {args.host} is cut, after step {newest(args.folder)}")
    else:
        host.kill()
        say(f"host {args.host} is down, after step {newest(args.folder)}")
    time.sleep(args.away)
    if args.cut_at:
        host.set_cable(plugged=True)
    else:
        start(host, head, args)
    say(f"host {args.host} is back, after step {newest(args.folder)}")


def watch(hosts: list[Host], args: argparse.Namespace) -> bool:
    """Wait for the end of all hosts, and lose one meanwhile; True if all succeeded."""
    end, lose_at = time.monotonic() + args.limit, args.cut_at or args.kill_at
    while any(host.poll() is None for host in hosts):
        if time.monotonic() > end:
            say(f"no end after {args.limit} s")
            return False
        if lose_at and newest(args.folder) >= lose_at:
            lose(hosts[args.host], hosts[0], args)
            lose_at = 0
        time.sleep(0.05)
    if lose_at:
        say(f"expected a checkpoint of step {lose_at} or later, got {newest(args.folder)} at the end")
    return not lose_at and not any(host.poll() for host in hosts)


def run(args: argparse.Namespace) -> bool:
    """Start the hosts in this network, and wait for their end; True if all succeeded."""
    with ExitStack() as stack:
        args.folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        args.folder.mkdir(exist_ok=True, parents=True)
        ip(*TRY[1:])
        ip("link", "set", "switch", "up")
        hosts = []
        for number in range(args.hosts):
            hosts.append(Host(number))
            stack.callback(hosts[-1].kill, with_network=True)
        for host in hosts:
            start(host, hosts[0], args)
        succeeded = watch(hosts, args)
        say(f"all hosts have ended; newest checkpoint: step {newest(args.folder)}")
    return succeeded


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="(%(default)s)")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks of a host (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="(%(default)s)")
    parser.add_argument("--cut-at", type=int, default=0, metavar="STEP", help="cut the network of a host")
    parser.add_argument("--kill-at", type=int, default=0, metavar="STEP", help="kill all processes of a host")
    parser.add_argument("--host", type=int, metavar="N", help="the number of this host (the last one)")
    parser.add_argument("--away", type=float, default=20, metavar="S", help="for so long (%(default)s)")
    parser.add_argument("--limit", type=float, default=300, metavar="S", help="give up (%(default)s)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for checkpoints (a temporary one)")
    parser.add_argument("--script", type=Path, help="with the options of finetune.py (finetune.py)")
    args = parser.parse_args()
    args.host = args.hosts - 1 if args.host is None else args.host
    if not 1 <= args.hosts <= 200:
        parser.error(f"--hosts: expected 1 to 200, got {args.hosts}")
    if not 0 <= args.host < args.hosts:
        parser.error(f"--host: expected 0 to {args.hosts - 1}, got {args.host}")
    if args.cut_at and args.kill_at:
        parser.error("expected --cut-at or --kill-at, got both")
    return args


def main() -> None:
    args = parse()
    if INSIDE in os.environ:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # hosts end, too
        sys.exit(not run(args))
    try:
        way = way_inside()
    except OSError as error:
        sys.exit(f"hosts.py: {error}")
    os.execvpe(way[0], [*way, sys.executable, *sys.argv], os.environ | {INSIDE: "1"})


if __name__ == "__main__":
    main()
