"""The files of examples/launch: what scripts start, several hosts that lose one, resources of Kubernetes."""

import importlib.util
import json
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import environment
from tests.examples.main_job import finetune

yaml = pytest.importorskip("yaml")

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


def hosts_module():
    """examples/launch/hosts.py, imported."""
    spec = importlib.util.spec_from_file_location("hosts_of_launch", LAUNCH / "hosts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def no_namespaces():
    """Return the reason why hosts.py cannot run here; None if it can."""
    try:
        hosts_module().way_inside()
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


@pytest.mark.long(seconds=150)
def test_a_run_of_two_hosts_goes_on_to_the_same_losses_when_one_is_cut_off_and_back(ranks, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"micro_batch_size": 2}))
    options = [*hosts_module().SMALL, "--config", str(tmp_path / "config.json"), "--steps", "20"]
    whole = ranks(2, finetune, str(tmp_path), *options, process_group=False)[0]
    assert whole.code is None, whole
    for loss, host in (("--cut-at", "1"), ("--kill-at", "0")):
        ended = hosts(tmp_path / loss, "--steps", "20", loss, "6", "--host", host)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        lost = re.search(
            rf"^hosts\.py: (?:the network of )?host {host} is (?:cut|down), after step (\d+)",
            ended.stdout,
            re.MULTILINE,
        )
        assert lost is not None
        assert 6 <= int(lost[1]) < 20  # a checkpoint more may be there by then
        assert f"hosts.py: host {host} is back, after step" in ended.stdout
        assert re.search(r"going on after step [1-9]", ended.stdout)
        assert "newest checkpoint: step 20" in ended.stdout
        assert losses(ended.stdout) == losses(whole.printed)


# ----------------------------------------------- resources of Kubernetes, by the fields that their kinds have

KINDS = {"pytorchjob": "PyTorchJob", "jobset": "JobSet", "rayjob": "RayJob"}

# The fields that a launch may use, after their definitions: kubeflow/training-operator
# manifests/base/crds/kubeflow.org_pytorchjobs.yaml at 078ec30f (release-1.9), kubernetes-sigs/jobset
# config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml at 08dfbdfd, ray-project/kuberay
# ray-operator/config/crd/bases/ray.io_rayjobs.yaml at feeaf72f; fields of pods are a part of core/v1. A form
# is a type, a pattern of a text, a list of one form, or a dict of the forms of fields: "!" marks fields that
# must be there, and the key `str` stands for any name.
NAME, PATH, QUANTITY = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "/.*", r"\d+(\.\d*)?([KMGTPE]i|[numkMGTPE])?"
AMOUNTS = {str: (int, QUANTITY)}
CONTAINER = {"name!": NAME, "image!": str, "workingDir": PATH, "command": [str], "args": [str]}
CONTAINER |= {"ports": [{"containerPort!": int}], "resources": {"limits": AMOUNTS, "requests": AMOUNTS}}
CONTAINER |= {"volumeMounts": [{"name!": NAME, "mountPath!": PATH}]}
CLAIM, MEMORY = {"claimName!": str}, {"medium": "Memory", "sizeLimit": str}
VOLUME = {"name!": NAME, "persistentVolumeClaim": CLAIM, "emptyDir": MEMORY}
RESTARTS = "Always|OnFailure|Never"
POD = {"spec!": {"containers!": [CONTAINER], "restartPolicy": RESTARTS, "volumes": [VOLUME]}}
JOB = {"spec!": {"parallelism": int, "completions": int, "backoffLimit": int, "template!": POD}}
REPLICAS = {"replicas": int, "restartPolicy": f"{RESTARTS}|ExitCode", "template!": POD}
ELASTIC = {"minReplicas": int, "maxReplicas": int, "maxRestarts": int, "rdzvBackend": "c10d|etcd|etcd-v2"}
HEAD = {"rayStartParams": {str: str}, "template!": POD}
WORKERS = {"groupName!": NAME, "replicas": int, "minReplicas!": int, "maxReplicas!": int, **HEAD}
SPECS = {
    "PyTorchJob": {
        "nprocPerNode": "auto|cpu|gpu|[1-9][0-9]*",
        "elasticPolicy": ELASTIC,
        "runPolicy": {"backoffLimit": int, "cleanPodPolicy": "None|Running|All"},
        "pytorchReplicaSpecs!": {"Master": REPLICAS, "Worker!": REPLICAS},
    },
    "JobSet": {
        "failurePolicy": {"maxRestarts": int},
        "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool, "subdomain": NAME},
        "replicatedJobs!": [{"name!": NAME, "replicas": int, "template!": JOB}],
    },
    "RayJob": {
        "entrypoint!": str,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "rayClusterSpec!": {"headGroupSpec!": HEAD, "workerGroupSpecs": [WORKERS]},
    },
}
VERSIONS = {"PyTorchJob": "kubeflow.org/v1", "JobSet": "jobset.x-k8s.io/v1alpha2", "RayJob": "ray.io/v1"}


def read(name):
    return yaml.safe_load((LAUNCH / f"{name}.yaml").read_text(encoding="utf-8"))


def has(form, value):
    """True if a value has a form."""
    if isinstance(form, tuple):
        return any(has(one, value) for one in form)
    if isinstance(form, type):
        return type(value) is form and (form is not int or value >= 0)
    if isinstance(form, str):
        return isinstance(value, str) and re.fullmatch(form, value) is not None
    if isinstance(form, list):
        return isinstance(value, list) and value != [] and all(has(form[0], item) for item in value)
    fields = {str(key).rstrip("!"): kind for key, kind in form.items()}
    required = {key.rstrip("!") for key in form if key is not str and key.endswith("!")}
    return (
        isinstance(value, dict)
        and required <= value.keys()
        and all(has(form.get(str, fields.get(key, ())), item) for key, item in value.items())
    )


def fits(resource):
    kind = resource["kind"]
    whole = {"apiVersion!": VERSIONS[kind], "kind!": kind, "metadata!": {"name!": NAME}, "spec!": SPECS[kind]}
    return has(whole, resource)


def find(value, key):
    """All values of a key, however deep."""
    if isinstance(value, list):
        return [found for item in value for found in find(item, key)]
    if not isinstance(value, dict):
        return []
    own = [value[key]] if key in value else []
    return own + [found for item in value.values() for found in find(item, key)]


@pytest.mark.parametrize("name", KINDS)
def test_a_resource_has_known_fields_of_the_right_types_and_its_volumes_and_scripts_are_there(name):
    assert {path.stem for path in LAUNCH.glob("*.yaml")} == set(KINDS)
    resource = read(name)
    assert resource["kind"] == KINDS[name]
    for pod in [spec for spec in find(resource, "spec") if "containers" in spec]:
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in find(pod["containers"], "volumeMounts")[0]} <= volumes
    scripts = re.findall(r"examples/\w+\.py", json.dumps(resource))
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)
    assert fits(resource)
    assert not fits(resource | {"spec": resource["spec"] | {"replicass": 4}})
    find(resource, "containers")[0][0]["image"] = 5
    assert not fits(resource)


def test_the_pod_that_the_others_of_a_jobset_reach_is_its_first():
    resource = read("jobset")
    (job,) = resource["spec"]["replicatedJobs"]
    name, number = resource["metadata"]["name"], job["template"]["spec"]["parallelism"]
    container = job["template"]["spec"]["template"]["spec"]["containers"][0]
    assert f"--rdzv-endpoint={name}-{job['name']}-0-0.{name}:29500" in container["args"]
    assert f"--nnodes={number}" in container["command"]
