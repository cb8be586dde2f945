"""Separate environments for packages that conflict with tfdml's own.

They also see the packages of the Python that runs the tests, with lower priority than their own.
Environments are created on first use, and kept.
"""

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What importing PyTorch needs; its GPU libraries are left out.
_OF_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "mpmath", "typing_extensions")
# What importing SageMaker's package needs.
_OF_BOTO = ("boto3", "botocore", "jmespath", "s3transfer")
_OF_PARAMIKO = ("paramiko", "bcrypt", "cffi", "cryptography", "pynacl")
# What users start programs with; in an environment they start its own Python.
COMMANDS = ("tfdml", "horovodrun")


def hub_python() -> Path:
    """Returns a Python with KerasHub.

    KerasHub requires `tensorflow-text`, which brings a second TensorFlow. The models tested here
    need neither, as their text is tokens. So KerasHub is installed without its requirements, plus
    the packages that its import needs.
    """
    return _python(".venv-hub", ["--no-deps", "keras-hub==0.32.*", "regex", "tokenizers"])


def loggers_python() -> Path:
    """Returns a Python with MLflow and Weights & Biases."""
    return _python(".venv-loggers", ["mlflow==3.17.*", "wandb==0.31.*"])


def ray_python() -> Path:
    """Returns a Python with Ray Train, Tune and Data."""
    return _python(".venv-ray", ["ray[train,tune]==2.60.*"])


def byzfl_python() -> Path:
    """Returns a Python with ByzFL, of which the rules are imported, and not the plots."""
    return _python(".venv-byzfl", ["--no-deps", "byzfl==0.0.11", "torch==2.13.*", *_OF_TORCH])


def kubeflow_python() -> Path:
    """Returns a Python with the official models of Kubeflow Trainer's resources."""
    return _python(".venv-kubeflow", ["kubeflow-trainer-api==2.3.*"])


def flower_python() -> Path:
    """Returns a Python with Flower and its simulation, which need older packages than tfdml."""
    return _python(".venv-flower", ["flwr[simulation]==1.42.*"])


def tuners_python() -> Path:
    """Returns a Python with KerasTuner and Optuna."""
    return _python(".venv-tuners", ["keras-tuner==1.4.*", "optuna==5.*"])


def spark_python() -> Path:
    """Returns a Python with Spark and its distributor of TensorFlow jobs."""
    return _python(".venv-spark", ["pyspark==4.3.*", "spark-tensorflow-distributor==1.*"])


def clouds_python() -> Path:
    """Returns a Python with the libraries by which clouds are given jobs."""
    libraries = ["azure-ai-ml==1.35.*", "boto3==1.44.*", "google-cloud-aiplatform==2.7.*"]
    return _python(".venv-clouds", libraries)


def sagemaker_python() -> Path:
    """Returns a Python with what SageMaker's images start a training with.

    It asks for older packages than TensorFlow, so it is installed without its requirements.
    """
    own = ["sagemaker-tensorflow-training==20.5.0", "sagemaker-training==4.8.3"]
    return _python(".venv-sagemaker", ["--no-deps", *own, "retrying", *_OF_BOTO, *_OF_PARAMIKO])


def _python(name: str, requirements: list[str]) -> Path:
    """Returns an environment's Python; creates it if missing or of other requirements.

    Args:
        name: Directory of the environment in the repository, ignored by git.
        requirements: Arguments of `pip install`.
    """
    environment = ROOT / name
    own = environment / "bin" / "python"
    stamp = environment / "made_of"
    made_of = hashlib.sha256(
        "\0".join([*requirements, *COMMANDS, sys.version]).encode()
    ).hexdigest()
    if stamp.exists() and stamp.read_text() == made_of:
        return own
    subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    entry = environment / "lib" / version / "site-packages" / "tfdml_environment.pth"
    entry.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    install = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *requirements], check=True)
    for script in (Path(sys.executable).with_name(command) for command in COMMANDS):
        if script.exists():
            _, *lines = script.read_text().splitlines(keepends=True)
            command = own.with_name(script.name)
            command.write_text("".join([f"#!{own}\n", *lines]))
            command.chmod(0o755)
    stamp.write_text(made_of)
    return own
