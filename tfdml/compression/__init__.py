"""Gradient compression: `HorovodStrategy(compression=tfdml.compression.QSGD())`."""

from collections.abc import Callable

from tfdml.compression.auto.auto import Auto
from tfdml.compression.codecs.deep_gradient import DeepGradientCompression
from tfdml.compression.codecs.float16 import BFloat16, Float16
from tfdml.compression.codecs.natural import NaturalCompression
from tfdml.compression.codecs.one_bit import OneBit
from tfdml.compression.codecs.power_sgd import PowerSGD
from tfdml.compression.codecs.qsgd import QSGD
from tfdml.compression.codecs.random_k import RandomK
from tfdml.compression.codecs.tern_grad import TernGrad
from tfdml.compression.codecs.top_k import TopK
from tfdml.compression.compressor import Compressor
from tfdml.compression.exchange.redistribution import redistributed

__all__ = [
    "Auto",
    "BFloat16",
    "Compressor",
    "DeepGradientCompression",
    "Float16",
    "NaturalCompression",
    "OneBit",
    "PowerSGD",
    "QSGD",
    "RandomK",
    "TernGrad",
    "TopK",
    "get",
    "redistributed",
]

# Names are compared without case, "_" and "-": "top_k" and "TopK" are "topk".
_BY_NAME: dict[str, Callable[[], Compressor | None]] = {
    "none": lambda: None,
    "auto": Auto,
    "fp16": Float16,
    "float16": Float16,
    "bf16": BFloat16,
    "bfloat16": BFloat16,
    "qsgd": QSGD,
    "int8": QSGD,
    "int4": lambda: QSGD(bits=4),
    "natural": NaturalCompression,
    "terngrad": TernGrad,
    "onebit": OneBit,
    "topk": TopK,
    "randomk": RandomK,
    "dgc": DeepGradientCompression,
    "powersgd": PowerSGD,
}


def get(identifier: "Compressor | str | None") -> Compressor | None:
    """Returns the compressor that a strategy's `compression` argument stands for.

    Args:
        identifier: A compressor; its name or that of its class, in any spelling ("topk", "top_k",
            "TopK"); or None or "none" for no compression.

    Raises:
        ValueError: If `identifier` is none of these.
    """
    if identifier is None or isinstance(identifier, Compressor):
        return identifier
    if isinstance(identifier, str):
        name = identifier.lower().replace("_", "").replace("-", "")
        classes = {make.__name__.lower(): make for make in _BY_NAME.values()}
        make = _BY_NAME.get(name) or classes.get(name)
        if make is not None:
            return make()
    raise ValueError(
        f"`compression` must be a compressor such as tfdml.compression.PowerSGD(rank=4), one of "
        f"{', '.join(map(repr, names()))}, or None. Received: compression={identifier!r}."
    )


def names() -> list[str]:
    """Returns the names that `get` knows, which the documentation and recipes show, too."""
    return list(_BY_NAME)
