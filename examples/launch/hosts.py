"""Try a training run over several hosts on one machine: each host is a torchrun with an address of its own.

    python examples/launch/hosts.py                                     # 2 hosts, with one rank each
    python examples/launch/hosts.py --lose-at 6                         # one is lost in the middle, and back

Hosts start `torchrun.sh`, as those of a cluster do; their addresses are 127.0.0.1, 127.0.0.2, ... With
--lose-at all processes of the last host are killed once a checkpoint of this step is there, and the host
starts again later. The ranks that are left notice it by `watchdog_s` of the config at the latest. All start
again once the host is back, and go on from the newest checkpoint. torchrun must be beside this Python.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

EXAMPLES = Path(__file__).resolve().parents[1]
WATCHDOG_S = 5
RDZV_CONF = "read_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"
"""Notices a host that is gone within seconds; torchrun's defaults are for larger networks."""
SMALL = ["--hidden", "32", "--layers", "2", "--seq-len", "32", "--batch-size", "2", "--eval-every", "1000"]


def lose(host: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a host at once."""
    processes = [psutil.Process(host.pid), *psutil.Process(host.pid).children(recursive=True)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    host.wait()


def start(number: int, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start torchrun.sh on a host."""
    config = args.folder / "config.json"
    config.write_text(json.dumps({"watchdog_s": WATCHDOG_S, "micro_batch_size": 2}))
    own = {"HEAD": "127.0.0.1", "ADDRESS": f"127.0.0.{number + 1}", "PORT": str(args.port)}
    own |= {"HOSTS": str(args.hosts), "NPROC": str(args.nproc), "OMP_NUM_THREADS": "1"}
    own |= {"RDZV_CONF": RDZV_CONF, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    checkpoints = ["--checkpoint-dir", str(args.folder / "checkpoints"), "--save-every", "2"]
    script = [str(EXAMPLES / "finetune.py"), "--config", str(config), "--steps", str(args.steps)]
    script += [*SMALL, *checkpoints, "--resume", "auto", "--plot", str(args.folder / "loss.png")]
    return subprocess.Popen(["bash", str(EXAMPLES / "launch" / "torchrun.sh"), *script], env=os.environ | own)


def newest(folder: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    latest = folder / "checkpoints" / "latest"
    return int(latest.read_text().split("-")[-1]) if latest.is_file() else 0


def wait(runs: list[subprocess.Popen[bytes]], args: argparse.Namespace) -> bool:
    """Wait for the end of all hosts, and lose the last one meanwhile; True if all succeeded."""
    end, lose_at = time.monotonic() + args.limit, args.lose_at
    while any(run.poll() is None for run in runs):
        if time.monotonic() > end:
            print(f"no end after {args.limit} s", flush=True)
            return False
        if lose_at and newest(args.folder) >= lose_at:
            lose_at = 0
            lose(runs[-1])
            print(f"the last host is lost, after step {newest(args.folder)}", flush=True)
            time.sleep(args.lose_s)
            print("the last host is back", flush=True)
            runs[-1] = start(len(runs) - 1, args)
        time.sleep(0.05)
    return not any(run.returncode for run in runs)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="(%(default)s)")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks of a host (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="(%(default)s)")
    parser.add_argument("--lose-at", type=int, default=0, metavar="STEP", help="lose the last host")
    parser.add_argument("--lose-s", type=float, default=10, metavar="S", help="for so long (%(default)s)")
    parser.add_argument("--limit", type=float, default=300, metavar="S", help="give up (%(default)s)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for checkpoints (a temporary one)")
    args = parser.parse_args()
    args.port = free_port()
    with tempfile.TemporaryDirectory() as temporary:
        args.folder = args.folder or Path(temporary)
        args.folder.mkdir(exist_ok=True, parents=True)
        runs = [start(number, args) for number in range(args.hosts)]
        try:
            succeeded = wait(runs, args)
        finally:
            for run in runs:
                if run.poll() is None:
                    lose(run)
        print(f"all hosts have ended; newest checkpoint: step {newest(args.folder)}", flush=True)
    sys.exit(not succeeded)


if __name__ == "__main__":
    main()
