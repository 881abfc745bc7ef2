"""The scripts of examples/launch: what they start, and several hosts that lose one."""

import importlib.util
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import environment

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"

TELL = """
import os
# One write: both ranks write to one pipe, and a print of several words may be several writes.
text = " ".join(("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *os.sys.argv[1:]))
os.write(1, f"{text}\\n".encode())
"""

SRUN = """#!/usr/bin/env bash
# Stands for srun: starts the command once for each host, on this machine.
[[ "$1" == --kill-on-bad-exit=1 ]] || exit 9
shift
for ((host = 0; host < SLURM_JOB_NUM_NODES; host++)); do "$@" & children+=($!); done
for child in "${children[@]}"; do wait "$child" || exit 1; done
"""


def finding(folder, **more):
    """The environment of a script that finds commands in a folder first."""
    path = os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))
    return environment(PATH=path, **more)


def run(command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, **options)


def write(path, text):
    """Write a command."""
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_scripts_are_written_in_bash():
    for script in (*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")):
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert script.stat().st_mode & stat.S_IXUSR


def slurm(folder, torchrun, **more):
    """Run slurm.sbatch for two hosts; return the lines that these print."""
    write(folder / "srun", SRUN)
    write(folder / "torchrun", f"#!/usr/bin/env bash\n{torchrun}\n")
    write(folder / "scontrol", "#!/usr/bin/env bash\nprintf '127.0.0.1\\n127.0.0.2\\n'\n")
    job = {"SLURM_JOB_NODELIST": "host[0-1]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    command = ["bash", str(LAUNCH / "slurm.sbatch"), str(write(folder / "tell.py", TELL)), "--steps", "3"]
    ended = run(command, env=finding(folder, **job, **more))
    assert ended.returncode == 0, ended.stderr[-3000:]
    return sorted(ended.stdout.splitlines())


def test_slurm_starts_a_torchrun_on_each_host(tmp_path):
    first, second = slurm(tmp_path, 'echo "$@"', SLURM_GPUS_ON_NODE="8")
    assert first == second
    assert first == (
        "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id 7 --rdzv-endpoint 127.0.0.1:29500 "
        f"--max-restarts 3 {tmp_path}/tell.py --steps 3"
    )


@pytest.mark.long
def test_the_torchruns_of_slurm_start_ranks_that_find_each_other(tmp_path):
    real = f'exec "{sys.executable}" -m torch.distributed.run "$@"'
    assert slurm(tmp_path, real, NPROC="1", PORT=free_port()) == [
        "rank 0 of 2 --steps 3",
        "rank 1 of 2 --steps 3",
    ]


def test_torchrun_is_started_again_where_it_has_failed(tmp_path):
    write(
        tmp_path / "torchrun",
        f'#!/usr/bin/env bash\necho "$@" >> {tmp_path}/calls\n[[ $(wc -l < {tmp_path}/calls) == 2 ]]\n',
    )
    write(tmp_path / "sleep", "#!/usr/bin/env bash\n")
    given = {"HEAD": "10.0.0.1", "ADDRESS": "10.0.0.2", "HOSTS": "3:4", "NPROC": "8", "RDZV_CONF": "a=1"}
    command = ["bash", str(LAUNCH / "torchrun.sh"), "train.py", "--lr", "0.1"]
    assert run(command, env=finding(tmp_path, **given)).returncode == 0
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert first == second
    assert first == (
        "--nnodes 3:4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id zeroshard --rdzv-endpoint "
        "10.0.0.1:29500 --rdzv-conf is_host=0,a=1 --local-addr 10.0.0.2 --max-restarts 3 train.py --lr 0.1"
    )


# ------------------------------------------------------------------------------------------- several hosts


def hosts(folder, *options, **more):
    """Run hosts.py; skip the test where this system has no network namespaces for it."""
    if reason := no_namespaces():
        pytest.skip(reason)
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(LAUNCH / "hosts.py"), "--folder", folder / "run", *options]
    return run(command, env=finding(folder, XDG_CACHE_HOME=str(folder), **more))


def no_namespaces():
    """Return the reason why hosts.py cannot run here; None if it can."""
    spec = importlib.util.spec_from_file_location("hosts_of_launch", LAUNCH / "hosts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        module.way_inside()
    except OSError as error:
        return str(error)
    return None


def test_a_host_that_fails_fails_the_run(tmp_path):
    fails = write(tmp_path / "fails", "#!/usr/bin/env bash\nexit 3\n")
    ended = hosts(tmp_path, PYTHON=str(fails), TRIES="1")
    assert ended.returncode == 1
    assert ended.stderr.count("start 1 of torchrun has ended with an error") == 2


def test_a_system_without_network_namespaces_is_told_with_the_reason(tmp_path):
    def said():
        ended = run([sys.executable, str(LAUNCH / "hosts.py")], env={"PATH": str(tmp_path)})
        assert ended.returncode == 1
        return ended.stderr

    assert said() == (
        "hosts.py: expected Linux with the commands unshare, nsenter, ip; missing: unshare, nsenter, ip\n"
    )
    for tool in ("unshare", "nsenter", "ip"):
        write(tmp_path / tool, "#!/bin/sh\necho not permitted >&2; exit 1\n")
    assert "lets this user make network namespaces" in (text := said())
    assert "unshare --map-root-user --net: not permitted" in text


def losses(printed):
    """The loss of each step; a step that was taken twice has the newer one."""
    return dict(re.findall(r"^step (\d+)/\d+: loss ([\d.]+)", printed, re.MULTILINE))


@pytest.mark.long
def test_a_run_of_two_hosts_goes_on_to_the_same_losses_when_one_is_cut_off_and_back(tmp_path):
    whole = hosts(tmp_path / "whole", "--steps", "20")
    assert whole.returncode == 0, whole.stdout[-3000:] + whole.stderr[-3000:]
    for loss, host in (("--cut-at", "1"), ("--kill-at", "0")):
        ended = hosts(tmp_path / loss, "--steps", "20", loss, "6", "--host", host)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        assert re.search(
            rf"^hosts\.py: (the network of )?host {host} is (cut|down), after step 6",
            ended.stdout,
            re.MULTILINE,
        )
        assert f"hosts.py: host {host} is back, after step" in ended.stdout
        assert re.search(r"going on after step [1-9]", ended.stdout)
        assert "newest checkpoint: step 20" in ended.stdout
        assert losses(ended.stdout) == losses(whole.stdout)
