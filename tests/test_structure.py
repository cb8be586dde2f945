"""Checks the structure: imports point one way, and only one module reads the environment."""

import ast
import collections
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "tfdml"
FILES = sorted(PACKAGE.rglob("*.py"))
TOOLS = sorted((PACKAGE.parent / "tools").rglob("*.py"))
SOURCES = [*FILES, *TOOLS]

# Packages that a package may import from, apart from itself. Modules at the top of a package, such
# as `strategies/fit_session.py`, may use all of the package; its subpackages may use those modules.
MAY_IMPORT = {
    "topology": set(),
    "aggregation": set(),
    "collectives": {"topology"},
    "timeline": set(),
    "runtime": {"topology", "collectives", "checkpointing", "timeline"},
    "native": {"topology", "horovod_build"},
    "compression": {"collectives", "native"},
    "local_updates": set(),
    "row_split": set(),
    "known_versions": set(),
    "strategies": {
        "topology",
        "aggregation",
        "collectives",
        "compression",
        "local_updates",
        "checkpointing",
        "runtime",
        "row_split",
        "known_versions",
        "optimizers",
        "native",
        "verification",
        "timeline",
        "pipeline",
    },
    "verification": {"topology", "runtime"},
    "horovod_build": {"topology", "runtime"},
    "optimizers": {"collectives"},
    "schedules": set(),
    "checkpointing": set(),
    "callbacks": {"topology", "collectives", "strategies", "checkpointing", "runtime", "timeline"},
    "elastic": {"topology", "collectives", "strategies", "callbacks", "schedules"},
    "tensor_memory": set(),
    "reports": set(),
    "memory": {
        "collectives",
        "compression",
        "local_updates",
        "strategies",
        "tensor_memory",
        "reports",
    },
    "batch_size": {"topology", "collectives", "strategies", "callbacks"},
    "integrations": {"topology", "callbacks", "collectives", "runtime", "strategies"},
    "mixed_precision": set(),
    "pipeline": {"tensor_memory", "reports"},
    "data": {"row_split"},
    "cli": {
        "topology",
        "horovod_build",
        "runtime",
        "data",
        "checkpointing",
        "collectives",
        "compression",
        "memory",
        "native",
        "verification",
        "timeline",
    },
}

# Subpackages that a subpackage may import from, apart from itself.
MAY_IMPORT_WITHIN = {
    "callbacks/checkpoint": set(),
    "callbacks/performance": set(),
    "cli/checks": set(),
    "cli/selftest": set(),
    "compression/codecs": set(),
    "compression/exchange": {"codecs"},
    "compression/auto": {"codecs", "exchange"},
    "data/format": set(),
    "data/sources": {"format"},
    "data/read": {"format"},
    "data/write": {"format", "sources"},
    "data/check": {"format", "read", "sources"},
    "integrations/ray": set(),
    "runtime/hang_report": set(),
    "runtime/timing": set(),
    "runtime/guard": {"hang_report", "timing"},
    "runtime/servers": {"guard"},
    "runtime/launch": {"servers"},
    "strategies/observers": set(),
    "strategies/input": set(),
    "strategies/aggregation": set(),
    "strategies/replicas": {"aggregation", "input", "observers"},
    "strategies/sharded": {"replicas"},
    "strategies/parameter_server": {"input", "observers", "replicas", "keras_seam"},
    "strategies/parameter_server/step": set(),
    "strategies/parameter_server/cluster": set(),
    "strategies/parameter_server/chief": {"step"},
    "strategies/keras_seam": {
        "aggregation",
        "input",
        "observers",
        "parameter_server",
        "replicas",
        "sharded",
    },
    "strategies/keras_seam/data": set(),
    "strategies/keras_seam/step": set(),
    "strategies/keras_seam/local_updates": {"step"},
    "strategies/keras_seam/pipeline": {"step"},
    "strategies/keras_seam/fit": {"data", "local_updates", "pipeline", "step"},
    "strategies/keras_seam/recording": {"fit", "step"},
    "strategies/keras_seam/parameter_servers": {"data", "fit", "step"},
}


def _imports(file: Path) -> set[str]:
    """Returns the modules that a file imports, with the imported names."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _room(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def _packages(file: Path) -> list[str]:
    """Returns the package and the subpackages that contain a file, outermost first."""
    folders = file.relative_to(PACKAGE).parts[:-1]
    return ["/".join(folders[:n]) for n in range(1, len(folders) + 1)]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_point_one_way(file):
    rooms = {n.split(".")[1] for n in _imports(file) if n.startswith("tfdml.")}
    room = _room(file)
    if room == "__init__":
        assert not rooms, "`import tfdml` must not import TensorFlow: names are loaded on use."
    else:
        assert room in MAY_IMPORT, f"{room} is a new package: say in MAY_IMPORT what it may use."
        assert rooms - {room, "__version__"} <= MAY_IMPORT[room]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_between_subpackages_point_one_way(file):
    for package in _packages(file)[1:]:
        assert package in MAY_IMPORT_WITHIN, f"{package} is new: say here what it may use."
        parent, own = package.rsplit("/", 1)
        start = f"tfdml.{parent.replace('/', '.')}."
        used = {n.removeprefix(start).split(".")[0] for n in _imports(file) if n.startswith(start)}
        used = {name for name in used if (PACKAGE / parent / name).is_dir()}
        assert used - {own} <= MAY_IMPORT_WITHIN[package]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_only_topology_reads_the_environment(file):
    reads = {"os.environ", "os.getenv"} & {
        ast.unparse(n)
        for n in ast.walk(ast.parse(file.read_text()))
        if isinstance(n, ast.Attribute)
    }
    assert not reads or _room(file) == "topology"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_framework_internals_are_used_in_one_module(file):
    where = str(file.relative_to(PACKAGE))
    for private, room in {
        "keras.src": "strategies/keras_seam/",
        "tensorflow.python": (
            "strategies/replicas/batch_extended.py",
            "strategies/tensorflow_seam.py",
            "strategies/keras_seam/recording/noting.py",
            "strategies/replicas/extended.py",
            "strategies/replicas/variable_places.py",
            "strategies/parameter_server/extended.py",
            "collectives/unmanaged_variable.py",
            "runtime/servers/remote_calls.py",
            "cli/checks/devices.py",
        ),
    }.items():
        found = {n for n in _imports(file) if n.startswith(private)}
        assert not found or where.startswith(room), f"{found}: only {room} may know {private}"


# Attributes of Keras's and TensorFlow's objects that have no public name.
FRAMEWORK_ATTRIBUTES = {
    "optimizers": "_accumulated_gradients _distribution_strategy _trainable_variables_indices"
    " _get_variable_index _iterations _learning_rate _trainable_variables"
    " _model_variables_moving_average _update_model_variables_moving_average _var_key"
    " _clip_gradients",
    "models and layers": "_compile_metrics _distribute_strategy _embeddings _flatten_layers"
    " _functional _initial_epoch _inputs _inputs_struct _metrics _nodes_by_depth"
    " _non_trainable_variables _outputs_struct _save_model _symbolic_build _variables",
    "variables": "_direct_assign _dtype _get _handle _initialize _path _primary _shape"
    " _unique_id _value",
    "data of `fit`": "_batch_size _current_iterator _distributed_dataset _epoch_iterator"
    " _get_iterator _interrupted_warning _num_batches _num_samples _shuffle _steps_seen",
    "`tf.data`": "_drop_remainder _functions _index _num_shards _seed _seed2 _type_spec _values"
    " _variant_tensor",
    "`tf.distribute`": "_cancellation_mgr _cluster _cluster_due_for_update_or_finish"
    " _devices _distributed_container"
    " _cluster_update_lock _local_replica_id _num_replicas_in_sync _server_def"
    " _should_preemption_thread_run _strategy _v _variable_partitioner _WrapperFunction",
    "files": "_create_h5_group _h5_entry_group _h5_entry_initialized _h5_entry_path",
    "graphs and tapes": "_collections _get_function _id _recording _thread_local _update_input"
    " _add_control_inputs _set_device"
    " _VARSCOPESTORE_KEY _VARSTORE_KEY",
    "`fsspec`": "_strip_protocol",
    "Python operations": "_funcs _py_funcs",
    "Python": "_getframe",
}


def _own_names(tree: ast.AST) -> set[str]:
    """Returns the names that a file defines, and the attributes that it sets."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
            # A note on an object of Keras's or TensorFlow's.
            case ast.Attribute(attr=name, ctx=ast.Store()) if name.startswith("_tfdml_"):
                names.add(name)
    return names


def _private_reads(tree: ast.AST) -> set[str]:
    """Returns the private names that a file reads of other objects than `self` and `cls`."""
    reads = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name):
                reads.add(name)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=name), *_]):
                reads.add(name)
            case ast.ImportFrom(names=names):
                reads |= {alias.name for alias in names}
    return {n for n in reads if isinstance(n, str) and re.match(r"_[^_]", n)}


@pytest.mark.parametrize("file", SOURCES, ids=lambda f: str(f.relative_to(PACKAGE.parent)))
def test_private_names_are_read_in_their_own_file(file):
    """Named tuples' methods aside; a subclass may use what its base class keeps in `self`."""
    tree = ast.parse(file.read_text())
    of_frameworks = set(" ".join(FRAMEWORK_ATTRIBUTES.values()).split())
    foreign = _private_reads(tree) - _own_names(tree) - of_frameworks
    assert not foreign - {"_replace", "_asdict", "_fields", "_make", "_exit"}


def test_two_classes_never_share_a_name():
    classes = collections.Counter(
        node.name
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    # `tensorflow_names` has a name of TensorFlow's for each of its strategies.
    assert {name for name, count in classes.items() if count > 1} <= {"MultiWorkerMirroredStrategy"}


def test_recipes_use_public_names_only():
    for file in (PACKAGE.parent / "recipes").glob("*.py"):
        assert not {n for n in _imports(file) if n.startswith("tfdml.")}, file


def test_context_variables_are_listed():
    """State is passed by argument; by context only through Keras's functions and a user's."""
    found = {str(f.relative_to(PACKAGE)) for f in FILES if "ContextVar(" in f.read_text()}
    assert found == {
        "strategies/alone.py",  # `tfdml.alone()`: a public block of the user's.
        "strategies/keras_seam/calls.py",
        "strategies/keras_seam/parameter_servers/exporting.py",
        "strategies/traced.py",
    }
