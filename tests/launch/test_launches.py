"""The files of examples/launch: resources of Kubernetes by their schemas, scripts with real torchruns."""

import copy
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

jsonschema = pytest.importorskip("jsonschema")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
SCHEMAS = json.loads((ROOT / "tests/launch/schemas.json").read_text(encoding="utf-8"))["$defs"]
KINDS = {"pytorchjob": "PyTorchJob", "jobset": "JobSet", "rayjob": "RayJob"}


def read(name):
    return yaml.safe_load((LAUNCH / f"{name}.yaml").read_text(encoding="utf-8"))


def errors(resource):
    schema = {"$ref": f"#/$defs/{resource['kind']}", "$defs": SCHEMAS}
    jsonschema.Draft202012Validator.check_schema(schema)
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(resource)]


def find(value, key):
    """All values of a key, however deep."""
    if isinstance(value, list):
        return [found for item in value for found in find(item, key)]
    if not isinstance(value, dict):
        return []
    own = [value[key]] if key in value else []
    return own + [found for item in value.values() for found in find(item, key)]


def test_every_resource_has_a_schema():
    assert {path.stem for path in LAUNCH.glob("*.yaml")} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_a_resource_fits_its_schema(name):
    resource = read(name)
    assert resource["kind"] == KINDS[name]
    assert errors(resource) == []


@pytest.mark.parametrize("name", KINDS)
def test_a_schema_refuses_a_field_that_is_misspelled_or_of_another_type(name):
    for change in ({"replicass": 4}, {"suspendd": True}):
        wrong = copy.deepcopy(read(name))
        wrong["spec"] |= change
        assert errors(wrong)
    wrong = copy.deepcopy(read(name))
    find(wrong, "containers")[0][0]["image"] = 5
    assert errors(wrong)


@pytest.mark.parametrize("name", KINDS)
def test_every_volume_is_there_and_every_script_too(name):
    resource = read(name)
    for pod in [spec for spec in find(resource, "spec") if "containers" in spec]:
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in find(pod["containers"], "volumeMounts")[0]} <= volumes
    scripts = re.findall(r"examples/\w+\.py", json.dumps(resource))
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)


def test_the_pod_that_the_others_of_a_jobset_reach_is_its_first():
    resource = read("jobset")
    (job,) = resource["spec"]["replicatedJobs"]
    name, number = resource["metadata"]["name"], job["template"]["spec"]["parallelism"]
    container = job["template"]["spec"]["template"]["spec"]["containers"][0]
    assert f"--rdzv-endpoint={name}-{job['name']}-0-0.{name}:29500" in container["args"]
    assert f"--nnodes={number}" in container["command"]


# ---------------------------------------------------------------------------------------------- scripts

TELL = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *os.sys.argv[1:], flush=True)
"""

SRUN = """#!/usr/bin/env bash
# Stands for srun: starts the command once for each host, on this machine.
[[ "$1" == --kill-on-bad-exit=1 ]] || exit 9
shift
for ((host = 0; host < SLURM_JOB_NUM_NODES; host++)); do "$@" & children+=($!); done
for child in "${children[@]}"; do wait "$child" || exit 1; done
"""


def environment(folder, **more):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in names}
    path = os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))
    return kept | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more


def write(path, text):
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def free_port():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_scripts_are_written_in_bash():
    for script in (*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")):
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert script.stat().st_mode & stat.S_IXUSR


def test_slurm_starts_a_torchrun_on_each_host(tmp_path):
    write(tmp_path / "srun", SRUN)
    write(tmp_path / "scontrol", "#!/usr/bin/env bash\nprintf '127.0.0.1\\n127.0.0.2\\n'\n")
    tell = write(tmp_path / "tell.py", TELL)
    slurm = {"SLURM_JOB_NODELIST": "host[0-1]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    ended = subprocess.run(
        ["bash", str(LAUNCH / "slurm.sbatch"), str(tell), "--steps", "3"],
        env=environment(tmp_path, NPROC="1", PORT=free_port(), **slurm),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert sorted(re.findall(r"^rank .*$", ended.stdout, re.MULTILINE)) == [
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
    subprocess.run(command, env=environment(tmp_path, **given), check=True, timeout=60)
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert first == second
    assert first == (
        "--nnodes 3:4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id zeroshard --rdzv-endpoint "
        "10.0.0.1:29500 --rdzv-conf is_host=0,a=1 --local-addr 10.0.0.2 --max-restarts 3 train.py --lr 0.1"
    )


@pytest.mark.long
def test_a_run_goes_on_when_a_host_is_lost_and_comes_back(tmp_path):
    ended = subprocess.run(
        [sys.executable, str(LAUNCH / "hosts.py"), "--steps", "40", "--lose-at", "6", "--folder", tmp_path],
        env=environment(tmp_path, XDG_CACHE_HOME=str(tmp_path)),
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "the last host is lost, after step" in ended.stdout
    assert re.search(r"going on after step [1-9]", ended.stdout)
    assert "newest checkpoint: step 40" in ended.stdout
