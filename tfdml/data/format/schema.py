"""Schema of records: their features, and how they are stored."""

import dataclasses
from collections.abc import Mapping
from typing import Any

# Kinds of storage of a feature in an Example.
INT64, FLOAT, STRING, RAW, IMAGE = "int64", "float32", "string", "raw", "image"
_KINDS = (INT64, FLOAT, STRING, RAW, IMAGE)
# Dtypes that `tf.io.decode_raw` can read.
RAW_DTYPES = (
    *("uint8", "int8", "uint16", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "bool"),
)
# TensorFlow Datasets stores lists of lists under these names.
FLAT_VALUES, ROW_LENGTHS = "/ragged_flat_values", "/ragged_row_lengths_0"


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of every record.

    Attributes:
        kind: Storage: "int64", "float32" and "string" as lists of an Example; "raw" as the
            little-endian bytes of an array of `dtype`; "image" as the bytes of an image file.
        shape: `()` for one value, `(28, 28)` for an array, `(None,)` for a list of any length,
            `(None, None)` for a list of lists.
        dtype: NumPy name of the dtype of a "raw" feature.
        classes: Names of the classes that an integer stands for.
    """

    kind: str
    shape: tuple[int | None, ...] = ()
    dtype: str = ""
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"`kind` must be one of {_KINDS}. Received: kind={self.kind!r}.")
        if None in self.shape and self.shape not in ((None,), (None, None)):
            raise ValueError(
                f"`shape` must be fixed, (None,) or (None, None). Received: shape={self.shape}."
            )
        if self.kind == RAW and (self.dtype not in RAW_DTYPES or None in self.shape):
            raise ValueError(
                f"A raw feature must have a fixed shape and a dtype of {RAW_DTYPES}. Received: "
                f"shape={self.shape}, dtype={self.dtype!r}."
            )
        if self.kind == IMAGE and self.shape:
            raise ValueError(f"An image must have shape (). Received: shape={self.shape}.")

    @property
    def is_variable(self) -> bool:
        """Whether its length differs between records."""
        return None in self.shape

    def to_json(self) -> dict[str, Any]:
        """Returns the description of the feature in a manifest."""
        description = {"kind": self.kind, "shape": list(self.shape)}
        if self.dtype:
            description["dtype"] = self.dtype
        if self.classes:
            description["classes"] = list(self.classes)
        return description


class Schema(dict[str, Feature]):
    """The features of every record, by name."""

    def to_json(self) -> dict[str, Any]:
        """Returns the descriptions of the features in a manifest, sorted by name."""
        return {name: self[name].to_json() for name in sorted(self)}

    @classmethod
    def from_json(cls, said: Mapping[str, Mapping[str, Any]]) -> "Schema":
        """Returns the schema that a manifest or a user's JSON describes.

        Raises:
            ValueError: If it does not describe a schema.
        """
        if not isinstance(said, Mapping) or not said:
            raise ValueError(f"`schema` must name at least one feature. Received: {said!r}.")
        schema = cls()
        for name, feature in said.items():
            try:
                values = {"kind": feature} if isinstance(feature, str) else dict(feature)
                for field in ("shape", "classes"):
                    values[field] = tuple(values.get(field, ()))
                schema[name] = Feature(**values)
            except (TypeError, ValueError) as error:
                raise ValueError(f"`schema`, feature {name!r}: {error}") from error
        return schema


def short(value: Any) -> str:
    """Returns a value as error messages show it: at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
