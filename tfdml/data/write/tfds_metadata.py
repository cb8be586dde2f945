"""Metadata files with which TensorFlow Datasets opens the shards (`builder_from_directory`)."""

import json
from typing import Any

from tfdml.data.format import storage
from tfdml.data.format.manifest import DatasetManifest
from tfdml.data.format.schema import FLOAT, IMAGE, INT64, RAW, STRING, Feature

FILES = ("dataset_info.json", "features.json")
_CORE = "tensorflow_datasets.core.features."


def write(manifest: DatasetManifest) -> None:
    """Writes the metadata of a data set, unless its shards are compressed: TFDS cannot read those.

    Args:
        manifest: Manifest of the data set.
    """
    if any(s.file.endswith(".gz") for shards in manifest.splits.values() for s in shards):
        return
    for name, content in zip(FILES, (_info(manifest), _features(manifest)), strict=True):
        path = storage.join(manifest.directory, name)
        storage.write_bytes(path, (json.dumps(content, indent=1) + "\n").encode())


def _info(manifest: DatasetManifest) -> dict[str, Any]:
    return {
        "name": manifest.name,
        "version": "1.0.0",
        "fileFormat": "tfrecord",
        "moduleName": "tfdml.data",
        "splits": [
            {
                "name": split,
                "filepathTemplate": "{DATASET}-{SPLIT}-{SHARD_X_OF_Y}.{FILEFORMAT}",
                "numBytes": str(sum(s.bytes for s in shards)),
                "shardLengths": [str(s.records) for s in shards],
            }
            for split, shards in sorted(manifest.splits.items())
        ],
    }


def _features(manifest: DatasetManifest) -> dict[str, Any]:
    return {
        "pythonClassName": f"{_CORE}features_dict.FeaturesDict",
        "featuresDict": {
            "features": {name: _feature(f) for name, f in sorted(manifest.schema.items())}
        },
    }


def _feature(feature: Feature) -> dict[str, Any]:
    if feature.kind == IMAGE:
        return {
            "pythonClassName": f"{_CORE}image_feature.Image",
            "image": {"shape": {"dimensions": ["-1", "-1", "3"]}, "dtype": "uint8"},
        }
    if feature.kind == INT64 and feature.classes and not feature.shape:
        return {
            "pythonClassName": f"{_CORE}class_label_feature.ClassLabel",
            "classLabel": {"numClasses": str(len(feature.classes))},
        }
    dtype = {INT64: "int64", FLOAT: "float32", STRING: "string", RAW: feature.dtype}[feature.kind]
    if feature.is_variable:
        description = _tensor((), dtype)
        for _ in feature.shape:
            description = {
                "pythonClassName": f"{_CORE}sequence_feature.Sequence",
                "sequence": {"feature": description, "length": "-1"},
            }
        return description
    return _tensor(feature.shape, dtype, "bytes" if feature.kind == RAW else "none")


def _tensor(shape: tuple, dtype: str, encoding: str = "none") -> dict[str, Any]:
    return {
        "pythonClassName": f"{_CORE}tensor_feature.Tensor",
        "tensor": {
            "shape": {"dimensions": [str(n) for n in shape]},
            "dtype": dtype,
            "encoding": encoding,
        },
    }
