"""Checks `tfdml.NAME`: its own names, and as a fallback those of `tf.distribute`."""

import importlib.util
import pkgutil
import re
import subprocess
import sys

import pytest
import tensorflow as tf

import tfdml
from tests.strategies.upstream.tutorials import cases
from tfdml.topology import child_environment

STRATEGIES = ("MirroredStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy")
OWN = {*STRATEGIES, "Server", "experimental"}
REFUSED = {"TPUStrategy", "CentralStorageStrategy"}


def names_of(module) -> set[str]:
    return {name for name in dir(module) if not name.startswith("_")}


def test_every_name_of_tf_distribute_exists():
    for name in names_of(tf.distribute) - OWN - REFUSED:
        assert getattr(tfdml, name) is getattr(tf.distribute, name), name
    for name in names_of(tf.distribute.experimental) - set(STRATEGIES) - REFUSED:
        found = getattr(tfdml.experimental, name)
        assert found is getattr(tf.distribute.experimental, name), name


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_are_tfdmls(name):
    assert getattr(tfdml, name) is getattr(tfdml.strategies, name)
    assert getattr(tfdml, name) is not getattr(tf.distribute, name)
    if hasattr(tf.distribute.experimental, name):
        assert issubclass(getattr(tfdml.experimental, name), getattr(tfdml.strategies, name))


def test_no_module_or_name_of_tfdml_hides_one_of_tf_distribute():
    """Except for the strategies, which hide them on purpose."""
    own = {module.name for module in pkgutil.iter_modules(tfdml.__path__)} | set(tfdml.__all__)
    assert own & names_of(tf.distribute) == set(STRATEGIES)
    for name in names_of(tf.distribute):
        assert importlib.util.find_spec(f"tfdml.{name}") is None


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (tfdml, "TPUStrategy"),
        (tfdml.experimental, "TPUStrategy"),
        (tfdml.experimental, "CentralStorageStrategy"),
    ],
)
def test_strategies_with_different_results_are_not_replaced_silently(where, name):
    with pytest.raises(AttributeError, match=f"tfdml has no `{name}`.*Write `tf.distribute.`"):
        getattr(where, name)


def test_every_strategy_of_tensorflow_is_considered():
    """A new TensorFlow may have more, and each needs a decision."""
    stock = {n for n in names_of(tf.distribute) | names_of(tf.distribute.experimental)}
    strategies = {n for n in stock if re.fullmatch(r"\w*Strategy", n)}
    passed_on = {"Strategy", "OneDeviceStrategy"}
    assert strategies == {*STRATEGIES, *REFUSED, *passed_on}


def test_unknown_name_of_tfdml():
    with pytest.raises(AttributeError, match="no attribute 'Nobody', and neither has"):
        _ = tfdml.Nobody
    assert not hasattr(tfdml, "_Nobody")


def test_dir_lists_tfdml_names_only():
    _ = tfdml.ReduceOp, tfdml.experimental
    assert not {"ReduceOp", "experimental", "Server"} & {*dir(tfdml), *tfdml.__all__}


def test_experimental_strategy_takes_tensorflows_arguments(ranks):
    (options,) = ranks(1).run(cases.experimental_strategy)
    assert options == ("RING None", "SimpleClusterResolver")


def test_tensorflow_is_imported_for_its_own_names_only():
    program = (
        "import sys, tfdml; from tfdml import topology, runtime, cli; "
        "assert not hasattr(tfdml, '__wrapped__'); assert 'tensorflow' not in sys.modules; "
        "tfdml.ReduceOp; assert 'tensorflow' in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=child_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
