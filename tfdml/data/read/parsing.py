"""Parsing of serialised records into tensors, all rows of a feature at once."""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from tfdml.data.format.schema import (
    FLAT_VALUES,
    FLOAT,
    IMAGE,
    INT64,
    RAW,
    ROW_LENGTHS,
    STRING,
    Feature,
    Schema,
)

_DTYPES = {INT64: tf.int64, FLOAT: tf.float32, STRING: tf.string}


@dataclasses.dataclass(frozen=True)
class ImageDecoding:
    """Options for decoding images to tensors of one shape.

    Attributes:
        size: Height and width. If None, the images of a batch must have the same size.
        channels: Number of channels, 1 or 3.
        crop: "resize" scales the whole image; "center" scales so that the shorter side fits, and
            cuts out the middle; "random" cuts out a random part as Inception did, and scales it.
            A JPEG is cropped while it is decoded.
    """

    size: tuple[int, int] | None = None
    channels: int = 3
    crop: str = "resize"

    def __post_init__(self) -> None:
        if self.crop not in ("resize", "center", "random"):
            raise ValueError(
                f'`crop` must be "resize", "center" or "random". Received: crop={self.crop!r}.'
            )
        if self.channels not in (1, 3):
            raise ValueError(f"`channels` must be 1 or 3. Received: channels={self.channels}.")
        if self.size is None and self.crop != "resize":
            raise ValueError(f"`size` must be given for crop={self.crop!r}. Received: size=None.")


def parser(schema: Schema, names: list[str]) -> Callable[[tf.Tensor], dict[str, tf.Tensor]]:
    """Returns a function that parses many records at once.

    Args:
        schema: Schema of the records.
        names: Features to parse; the others are ignored.

    Returns:
        A function of records (string, `[rows]`) that returns a tensor of shape `[rows, *shape]` for
        each feature, ragged where the shape is variable. Images are the bytes of their files.
    """
    spec = {}
    for name in names:
        spec |= _spec(name, schema[name])

    def parse(records: tf.Tensor) -> dict[str, tf.Tensor]:
        parsed = tf.io.parse_example(records, spec)
        return {name: _value(parsed[name], schema[name]) for name in names}

    return parse


def decoder(
    schema: Schema, names: list[str], images: ImageDecoding
) -> Callable[[dict[str, tf.Tensor], tf.Tensor], dict[str, tf.Tensor]]:
    """Returns a function that decodes the images among parsed features.

    Args:
        schema: Schema of the records.
        names: Features that were parsed.
        images: Options for decoding images.

    Returns:
        A function of the result of `parser` and two seeds for each row (int64, `[rows, 2]`). In its
        result images are uint8 of shape `[rows, height, width, channels]`.
    """
    pictures = {name for name in names if schema[name].kind == IMAGE}

    def decode(parsed: dict[str, tf.Tensor], seeds: tf.Tensor) -> dict[str, tf.Tensor]:
        return {n: _images(v, seeds, images) if n in pictures else v for n, v in parsed.items()}

    return decode


def _spec(name: str, feature: Feature) -> dict:
    if feature.kind in (RAW, IMAGE):
        return {name: tf.io.FixedLenFeature([], tf.string)}
    dtype = _DTYPES[feature.kind]
    if feature.shape == (None, None):
        return {
            name: tf.io.RaggedFeature(
                dtype,
                value_key=name + FLAT_VALUES,
                partitions=[tf.io.RaggedFeature.RowLengths(name + ROW_LENGTHS)],
                row_splits_dtype=tf.int64,
            )
        }
    if feature.is_variable:
        return {name: tf.io.RaggedFeature(dtype, row_splits_dtype=tf.int64)}
    return {name: tf.io.FixedLenFeature(feature.shape, dtype)}


def _value(value: tf.Tensor, feature: Feature) -> tf.Tensor:
    if feature.kind != RAW:
        return value
    return tf.reshape(tf.io.decode_raw(value, tf.as_dtype(feature.dtype)), [-1, *feature.shape])


def _images(files: tf.Tensor, seeds: tf.Tensor, options: ImageDecoding) -> tf.Tensor:
    height, width = options.size or (None, None)
    return tf.map_fn(
        lambda row: _image(row[0], row[1], options),
        (files, seeds),
        fn_output_signature=tf.TensorSpec((height, width, options.channels), tf.uint8),
    )


def _image(data: tf.Tensor, seed: tf.Tensor, options: ImageDecoding) -> tf.Tensor:
    if options.crop == "resize":
        image = tf.io.decode_image(data, channels=options.channels, expand_animations=False)
        return image if options.size is None else _resized(image, options)

    def from_jpeg() -> tf.Tensor:
        window = _window(tf.io.extract_jpeg_shape(data), seed, options)
        return tf.io.decode_and_crop_jpeg(data, window, channels=options.channels)

    def from_other() -> tf.Tensor:
        image = tf.io.decode_image(data, channels=options.channels, expand_animations=False)
        window = _window(tf.shape(image), seed, options)
        return tf.image.crop_to_bounding_box(image, window[0], window[1], window[2], window[3])

    return _resized(tf.cond(tf.io.is_jpeg(data), from_jpeg, from_other), options)


def _window(shape: tf.Tensor, seed: tf.Tensor, options: ImageDecoding) -> tf.Tensor:
    """Returns the part to cut out: offset and size, each height and width, int32, `[4]`."""
    if options.crop == "random":
        begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
            shape,
            tf.zeros([1, 0, 4]),
            seed,
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(0.08, 1.0),
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        return tf.stack([begin[0], begin[1], size[0], size[1]])
    height, width = options.size
    scale = tf.minimum(shape[0] / height, shape[1] / width)
    cut = tf.cast([scale * height, scale * width], tf.int32)
    begin = (shape[:2] - cut) // 2
    return tf.concat([begin, cut], 0)


def _resized(image: tf.Tensor, options: ImageDecoding) -> tf.Tensor:
    image = tf.image.resize(image, options.size)
    image = tf.cast(tf.round(tf.clip_by_value(image, 0.0, 255.0)), tf.uint8)
    return tf.ensure_shape(image, (*options.size, options.channels))
