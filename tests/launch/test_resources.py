"""The resources of Kubernetes in examples/launch, by their schemas."""

import copy
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
