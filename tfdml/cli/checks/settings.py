"""Checks of Keras settings: legacy Keras 2, and a backend other than TensorFlow."""

import json
from pathlib import Path

from tfdml import topology
from tfdml.cli.checks.finding import Finding, error, ok

_TRUE = {"1", "true", "t", "yes", "y"}


def check_legacy_keras() -> Finding:
    """Checks that `tf.keras` is Keras 3 and not the frozen Keras 2."""
    name, value = "tf.keras", topology.setting("TF_USE_LEGACY_KERAS")
    if value.strip().lower() in _TRUE:
        return error(
            name,
            f"TF_USE_LEGACY_KERAS={value} makes it Keras 2, which tfdml's strategies do not train",
            "Unset it: unset TF_USE_LEGACY_KERAS.",
        )
    return ok(name, "Keras 3")


def check_backend() -> Finding:
    """Checks that the environment or Keras's configuration file selects TensorFlow."""
    backend, origin = "tensorflow", ""
    configuration = _configuration_file()
    try:
        backend = json.loads(configuration.read_text(encoding="utf-8")).get("backend", backend)
        origin = str(configuration)
    except (OSError, ValueError):
        pass
    if chosen := topology.setting("KERAS_BACKEND"):
        backend, origin = chosen, "KERAS_BACKEND"
    if backend != "tensorflow":
        return error(
            "Keras backend",
            f"{backend}, from {origin}",
            "tfdml trains on TensorFlow: set KERAS_BACKEND=tensorflow.",
        )
    return ok("Keras backend", "tensorflow")


def _configuration_file() -> Path:
    home = topology.setting("KERAS_HOME")
    directory = Path(home) if home else Path.home() / ".keras"
    return directory / "keras.json"
