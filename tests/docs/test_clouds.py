"""Checks the page on clouds: what each sets is read as it says, and its job files are accepted."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs import pages
from tests.docs.pages import ROOT
from tests.harness import side_environment
from tfdml.runtime.servers.server_task import task_from_environment
from tfdml.topology import child_environment, own_host, setting, started_together

PAGE = ROOT / "docs" / "clouds.md"
BLOCKS = pages.blocks(PAGE)
JSON = [json.loads(block.text) for block in BLOCKS if block.language == "json"]
VERTEX, RESOURCES, SAGEMAKER_JOB, SAGEMAKER, AZURE = JSON
(LINES,) = [block.text for block in BLOCKS if block.language == "python"]
(TWO_PROCESSES,) = [block.text for block in BLOCKS if block.language == "bash"]


def environment(config: dict) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps(config)}


@pytest.mark.parametrize(
    ("config", "rank", "size", "host"),
    [
        (VERTEX, 1, 3, "training-workerpool1-ab-0"),
        (VERTEX | {"task": {"type": "chief", "index": 0}}, 0, 3, "training-workerpool0-ab-0"),
        # Its evaluators are not in the cluster, and do not train.
        (VERTEX | {"task": {"type": "evaluator", "index": 0}}, 0, 1, None),
        (SAGEMAKER, 1, 2, "algo-2"),
        (AZURE, 0, 2, "host0"),
        (AZURE | {"task": {"type": "worker", "index": 1}}, 1, 2, "host1"),
    ],
)
def test_what_a_cloud_sets_is_read(config, rank, size, host):
    job = started_together(environment(config))
    assert (job.rank, job.size, job.is_chief) == (rank, size, rank == 0)
    assert own_host(environment(config)) == host


def test_the_page_names_the_ranks():
    """In the order of its values; SageMaker's file is followed by the lines that read it."""
    configs = [VERTEX, tf_config(RESOURCES), SAGEMAKER, AZURE]
    jobs = [started_together(environment(config)) for config in configs]
    said = re.findall(r"rank (\d) of\s+(\d)", PAGE.read_text(encoding="utf-8"))
    assert said == [(str(job.rank), str(job.size)) for job in jobs]


def tf_config(resources: dict) -> dict:
    """Returns the `TF_CONFIG` that the page's lines make of SageMaker's file."""
    lines = LINES.replace('pathlib.Path("/opt/ml/input/config/resourceconfig.json")', "file")
    assert lines != LINES
    text = json.dumps(resources)
    code = lines.replace("file.read_text()", "text").replace("os.environ", "set_to")
    set_to: dict[str, str] = {}
    exec(compile(code, str(PAGE), "exec"), {"text": text, "set_to": set_to})
    return json.loads(set_to["TF_CONFIG"])


def test_lines_for_sagemaker():
    hosts = RESOURCES["hosts"]
    configs = [tf_config(RESOURCES | {"current_host": host}) for host in hosts]
    jobs = [started_together(environment(config)) for config in configs]
    assert [(job.rank, job.size) for job in jobs] == [(0, 3), (1, 3), (2, 3)]
    assert [own_host(environment(config)) for config in configs] == hosts
    assert len({json.dumps(config["cluster"]) for config in configs}) == 1


def test_parameter_servers(monkeypatch):
    """Vertex AI's are used, as its document's example has them; the others' are refused."""
    servers = {"ps": ["training-workerpool2-ab-0:2222"]}
    config = VERTEX | {"cluster": VERTEX["cluster"] | servers}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert task_from_environment().name == "worker 0"
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps(config | {"task": {"cloud": "cd", "type": "ps", "index": 0}})
    )
    assert task_from_environment().name == "parameter server 0"
    azure = {"ps": ["host0:2222"], "worker": ["host1:2222"]}
    sagemaker = {"master": ["algo-1:2222"], "ps": ["algo-1:2223"], "worker": ["algo-2:2222"]}
    for cluster in (azure, sagemaker):
        refused = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(refused))
        with pytest.raises(ValueError, match="Received: no chief in"):
            task_from_environment()


TRAIN = """
import json, os, pathlib
import keras, numpy as np, tfdml

strategy = tfdml.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(100, 8)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
losses = model.fit(x, x[:, :1], batch_size=32, epochs=2, verbose=0).history["loss"]
task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("type", "alone")
pathlib.Path(task).write_text(json.dumps([strategy.rank, strategy.size, losses]))
"""


@pytest.mark.slow
def test_two_processes_as_on_vertex_ai(tmp_path):
    """The page's first block trains: the chief is rank 0, and the numbers are one process's."""
    (tmp_path / "train.py").write_text(TRAIN)
    block = TWO_PROCESSES
    for port in ("2222", "2223"):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            block = block.replace(port, str(free.getsockname()[1]))
    path = f"{Path(sys.executable).parent}:{setting('PATH')}"
    variables = child_environment(PATH=path, PYTHONPATH=str(ROOT))
    for command in (block + "wait $!\n", "unset TF_CONFIG; python train.py"):
        subprocess.run(
            ["bash", "-ec", command], cwd=tmp_path, env=variables, timeout=200, check=True
        )
    ranks = [json.loads((tmp_path / name).read_text()) for name in ("chief", "worker", "alone")]
    assert [rank[:2] for rank in ranks] == [[0, 2], [1, 2], [0, 1]]
    (_, _, chief), (_, _, worker), (_, _, alone) = ranks
    assert chief == worker == pytest.approx(alone, rel=1e-6)


# The clouds' own libraries check a job before they send it, and what they make of their hosts.
CHECK = """
import json, pathlib, sys

jobs = json.loads(sys.stdin.read())
cloud = sys.argv[1]
if cloud == "vertex":
    from google.cloud import aiplatform_v1
    from google.protobuf import json_format
    spec = aiplatform_v1.CustomJobSpec.pb(aiplatform_v1.CustomJobSpec())
    json_format.ParseDict(jobs[cloud], spec)
    print(json.dumps([pool.replica_count for pool in spec.worker_pool_specs]))
elif cloud == "sagemaker":
    import botocore.session, botocore.validate
    service = botocore.session.get_session().get_service_model("sagemaker")
    shape = service.operation_model("CreateTrainingJob").input_shape
    report = botocore.validate.ParamValidator().validate(jobs[cloud], shape)
    if report.has_errors():
        sys.exit(report.generate_report())
    print(json.dumps([jobs[cloud]["ResourceConfig"]["InstanceCount"]]))
elif cloud == "azure":
    from azure.ai.ml import load_job
    file = pathlib.Path(sys.argv[2], "job.yml")
    file.write_text(json.dumps(jobs[cloud]))  # JSON is YAML.
    job = load_job(file)
    print(json.dumps([job.resources.instance_count, job.distribution.worker_count]))
else:
    from sagemaker_tensorflow_container.training import _build_tf_config_for_mwms
    print(json.dumps(_build_tf_config_for_mwms(["algo-1", "algo-2"], "algo-2")))
"""


def ask_library(cloud: str, directory: Path, jobs: dict) -> subprocess.CompletedProcess:
    own = (
        side_environment.sagemaker_python if cloud == "toolkit" else side_environment.clouds_python
    )
    return subprocess.run(
        [own(), "-c", CHECK, cloud, directory],
        input=json.dumps(jobs),
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def job_files() -> dict:
    vertex, azure = [yaml.safe_load(block.text) for block in BLOCKS if block.language == "yaml"]
    return {"vertex": vertex, "sagemaker": SAGEMAKER_JOB, "azure": azure}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cloud", "counts"), [("vertex", [1, 1]), ("sagemaker", [2]), ("azure", [2, 2])]
)
def test_job_files_are_accepted_by_the_clouds_libraries(tmp_path, cloud, counts):
    accepted = ask_library(cloud, tmp_path, job_files())
    assert accepted.returncode == 0, accepted.stderr
    assert json.loads(accepted.stdout.splitlines()[-1]) == counts
    unknown = {name: job | {"instances": 2} for name, job in job_files().items()}
    refused = ask_library(cloud, tmp_path, unknown)
    assert refused.returncode != 0
    assert "instances" in refused.stderr


@pytest.mark.slow
def test_sagemakers_package_sets_what_the_page_says(tmp_path):
    done = ask_library("toolkit", tmp_path, {})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == SAGEMAKER
