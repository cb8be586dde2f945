"""Real images for the recipes, from the first source that has them.

Fashion-MNIST (60,000 training and 10,000 validation images of 28x28, ten classes) from Debian's
package `dataset-fashion-mnist`, else from TensorFlow Datasets, else from Keras's download; where
none of these works, the 1,797 digits of 8x8 that come with scikit-learn.
"""

import dataclasses
import fcntl
import gzip
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

# A download that takes longer counts as failed.
DOWNLOAD_SECONDS = 180
PREFIXES = (sys.prefix, sys.base_prefix, "/usr/local", "/usr")


class DataUnavailable(RuntimeError):
    """Raised when a source of images does not work here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Images:
    """Labelled images for training and validation.

    Attributes:
        name: Name of the data set and of its source.
        x, y: Training images, float32 of shape (n, height, width, 1) from 0 to 1, and their
            classes, int64 of shape (n,).
        x_val, y_val: The same for validation.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    x_val: np.ndarray
    y_val: np.ndarray

    def limited(self, count: int | None) -> "Images":
        """Returns the first `count` training images, with all the validation images."""
        return dataclasses.replace(self, x=self.x[:count], y=self.y[:count])


def load(source: str = "auto") -> Images:
    """Loads images.

    Args:
        source: `debian`, `tfds`, `keras` or `digits`; `auto` for the first that works.

    Returns:
        The images.

    Raises:
        ValueError: If there is no such source.
        DataUnavailable: If the chosen source does not work here.
    """
    if source == "auto":
        return first_of(SOURCES.values())
    if source not in SOURCES:
        raise ValueError(
            f"`source` must be auto or one of {', '.join(SOURCES)}. Received: {source!r}"
        )
    return SOURCES[source]()


def load_or_exit(source: str, limit: int | None = None) -> Images:
    """Loads the first images for a recipe's command, which ends with a message if it cannot.

    Args:
        source: As in `load`.
        limit: The number of training images, None for all.
    """
    try:
        return load(source).limited(limit)
    except (DataUnavailable, ValueError) as reason:
        sys.exit(f"error: {reason}")


def first_of(sources: Sequence[Callable[[], Images]]) -> Images:
    """Returns the images of the first working source.

    Raises:
        DataUnavailable: If none works, with the reason of each.
    """
    reasons = []
    for source in sources:
        try:
            return source()
        except DataUnavailable as reason:
            reasons.append(str(reason))
    raise DataUnavailable("no source of images works: " + "; ".join(reasons))


def from_debian(prefixes: Sequence[str] = PREFIXES) -> Images:
    """Loads Fashion-MNIST from the files of Debian's dataset-fashion-mnist."""
    for prefix in prefixes:
        directory = Path(prefix) / "share" / "datasets" / "fashion-mnist"
        if (directory / "train-images-idx3-ubyte.gz").exists():
            break
    else:
        raise DataUnavailable(
            "Debian's dataset-fashion-mnist (apt-get install it) is not under "
            f"{', '.join(prefixes)}"
        )
    try:
        arrays = [
            read_idx(directory / f"{part}-{kind}.gz")
            for part in ("train", "t10k")
            for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
        ]
    except (OSError, EOFError, ValueError) as damage:
        raise DataUnavailable(f"{directory} is damaged: {damage}") from damage
    return _images("Fashion-MNIST from Debian's dataset-fashion-mnist", *arrays)


def from_tfds() -> Images:
    """Loads Fashion-MNIST from TensorFlow Datasets, downloading it once."""
    call = "tfds.load('fashion_mnist', split=['train', 'test'], batch_size=-1, as_supervised=True)"
    _download("TensorFlow Datasets", f"import tensorflow_datasets as tfds; {call}")
    import tensorflow_datasets as tfds

    train, test = tfds.load(
        "fashion_mnist", split=["train", "test"], batch_size=-1, as_supervised=True
    )
    arrays = [array.numpy() for pair in (train, test) for array in pair]
    return _images("Fashion-MNIST from TensorFlow Datasets", *arrays)


def from_keras() -> Images:
    """Loads Fashion-MNIST from Keras's datasets, downloading it once."""
    _download("keras.datasets", "import keras; keras.datasets.fashion_mnist.load_data()")
    import keras

    (x, y), (x_val, y_val) = keras.datasets.fashion_mnist.load_data()
    return _images("Fashion-MNIST from keras.datasets", x, y, x_val, y_val)


def from_digits() -> Images:
    """Loads scikit-learn's digits: small, but always available."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as missing:
        raise DataUnavailable(
            "scikit-learn is not installed: pip install scikit-learn"
        ) from missing
    digits = load_digits()
    x, y = digits.images * (255 / 16), digits.target
    return _images("scikit-learn's digits", x[:1500], y[:1500], x[1500:], y[1500:])


SOURCES: dict[str, Callable[[], Images]] = {
    "debian": from_debian,
    "tfds": from_tfds,
    "keras": from_keras,
    "digits": from_digits,
}


def read_idx(path: Path) -> np.ndarray:
    """Reads a gzipped IDX file of unsigned bytes.

    Args:
        path: The file: two zero bytes, the type 8, the number of dimensions, each dimension as a
            big-endian uint32, the values.

    Returns:
        The values, uint8.

    Raises:
        ValueError: If the header or the number of values is wrong.
    """
    with gzip.open(path) as opened:
        content = opened.read()
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} must begin with 0, 0, 8. Received: {list(content[:3])}")
    shape = np.frombuffer(content, ">u4", content[3], offset=4).astype(int)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * content[3])
    if values.size != shape.prod():
        raise ValueError(f"{path} must hold {shape.prod()} values. Received: {values.size}")
    return values.reshape(shape)


def _images(
    name: str, x: np.ndarray, y: np.ndarray, x_val: np.ndarray, y_val: np.ndarray
) -> Images:
    def scaled(pixels: np.ndarray) -> np.ndarray:
        return (pixels.reshape(*pixels.shape[:3], 1) / np.float32(255)).astype(np.float32)

    return Images(name, scaled(x), y.astype(np.int64), scaled(x_val), y_val.astype(np.int64))


def _download(name: str, code: str) -> None:
    """Downloads in a child process, one at a time on this machine, with a time limit."""
    with Path(tempfile.gettempdir(), "tfdml-recipes-download.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            done = subprocess.run(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=DOWNLOAD_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise DataUnavailable(f"{name} took longer than {DOWNLOAD_SECONDS} s") from late
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise DataUnavailable(f"{name}: {last[:200]}")
