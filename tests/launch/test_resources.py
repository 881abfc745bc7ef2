"""The resources of Kubernetes in examples/launch, by the fields that their kinds have."""

import json
import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
KINDS = {"pytorchjob": "PyTorchJob", "jobset": "JobSet", "rayjob": "RayJob"}

# The fields that a launch may use, after their definitions: kubeflow/training-operator
# manifests/base/crds/kubeflow.org_pytorchjobs.yaml at 078ec30f (release-1.9), kubernetes-sigs/jobset
# config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml at 08dfbdfd, ray-project/kuberay
# ray-operator/config/crd/bases/ray.io_rayjobs.yaml at feeaf72f; fields of pods are a part of core/v1. A form
# is a type, a pattern of a text, a list of one form, or a dict of the forms of fields: "!" marks fields that
# must be there, and the key `str` stands for any name.
NAME, PATH, QUANTITY = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "/.*", r"\d+(\.\d*)?([KMGTPE]i|[numkMGTPE])?"
AMOUNTS = {str: (int, QUANTITY)}
CONTAINER = {
    "name!": NAME,
    "image!": str,
    "workingDir": PATH,
    "command": [str],
    "args": [str],
    "ports": [{"containerPort!": int}],
    "resources": {"limits": AMOUNTS, "requests": AMOUNTS},
    "volumeMounts": [{"name!": NAME, "mountPath!": PATH}],
}
CLAIM, MEMORY = {"claimName!": str}, {"medium": "Memory", "sizeLimit": str}
POD = {
    "spec!": {
        "containers!": [CONTAINER],
        "restartPolicy": "Always|OnFailure|Never",
        "volumes": [{"name!": NAME, "persistentVolumeClaim": CLAIM, "emptyDir": MEMORY}],
    }
}
JOB = {"spec!": {"parallelism": int, "completions": int, "backoffLimit": int, "template!": POD}}
REPLICAS = {"replicas": int, "restartPolicy": "Always|OnFailure|Never|ExitCode", "template!": POD}
SPECS = {
    "PyTorchJob": {
        "nprocPerNode": "auto|cpu|gpu|[1-9][0-9]*",
        "elasticPolicy": {
            "minReplicas": int,
            "maxReplicas": int,
            "maxRestarts": int,
            "rdzvBackend": "c10d|etcd|etcd-v2",
        },
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
        "rayClusterSpec!": {
            "headGroupSpec!": {"rayStartParams": {str: str}, "template!": POD},
            "workerGroupSpecs": [
                {
                    "groupName!": NAME,
                    "replicas": int,
                    "minReplicas!": int,
                    "maxReplicas!": int,
                    "rayStartParams": {str: str},
                    "template!": POD,
                }
            ],
        },
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
def test_a_resource_has_known_fields_of_the_right_types_alone(name):
    assert {path.stem for path in LAUNCH.glob("*.yaml")} == set(KINDS)
    resource = read(name)
    assert resource["kind"] == KINDS[name]
    assert fits(resource)
    assert not fits(resource | {"spec": resource["spec"] | {"replicass": 4}})
    find(resource, "containers")[0][0]["image"] = 5
    assert not fits(resource)


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
