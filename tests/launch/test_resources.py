"""The resources of Kubernetes in examples/launch, by their schemas."""

import functools
import json
import re
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


@functools.cache
def validator(kind):
    schema = {"$ref": f"#/$defs/{kind}", "$defs": SCHEMAS}
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def errors(resource):
    return [error.message for error in validator(resource["kind"]).iter_errors(resource)]


def find(value, key):
    """All values of a key, however deep."""
    if isinstance(value, list):
        return [found for item in value for found in find(item, key)]
    if not isinstance(value, dict):
        return []
    own = [value[key]] if key in value else []
    return own + [found for item in value.values() for found in find(item, key)]


@pytest.mark.parametrize("name", KINDS)
def test_a_resource_fits_its_schema_which_refuses_misspelled_fields_and_other_types(name):
    assert {path.stem for path in LAUNCH.glob("*.yaml")} == set(KINDS)
    resource = read(name)
    assert resource["kind"] == KINDS[name]
    assert errors(resource) == []
    for change in ({"replicass": 4}, {"suspendd": True}):
        assert errors(resource | {"spec": resource["spec"] | change})
    find(resource, "containers")[0][0]["image"] = 5
    assert errors(resource)


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
