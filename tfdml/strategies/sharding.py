"""`Sharding`: the division of optimizer state and tables among the processes of a job."""

import dataclasses

# Values of `row_codec`; see `sharded.row_codecs`.
ROW_CODEC_NAMES = (None, "bfloat16", "int8")


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Divides an optimizer's state, and large embedding tables, among the processes of a job.

    ```python
    strategy = tfdml.HorovodStrategy(sharding=tfdml.Sharding(optimizer_state=True))
    ```

    Each process owns a part of every variable, keeps the optimizer's slots for that part alone, and
    updates it; then all gather the new weights. With N processes, slots take 1/N of the memory, and
    a step sends the bytes of an all-reduce. Weights, losses and metrics are those of training
    without it.

    Keras's optimizers that compute each number on its own are divided by rows: `SGD`, `Adam`,
    `AdamW`, `Adagrad`, `Adadelta`, `Adamax`, `Nadam`, `Ftrl`, `Lion` and `RMSprop`, unless they
    have a `clipnorm`. So are ours. All others, such as `Adafactor`, `Muon` and your own, need whole
    variables: each process owns some of them.

    `compression` encodes gradients on the way to their owners; new weights are sent as they are, so
    it saves at most half of the bytes.

    Saving a model together with its optimizer gathers the slots: all ranks must call `model.save`
    or `save_weights`, and rank 0 writes the file.

    `embeddings` divides the tables of `keras.layers.Embedding` layers as well: row i is on process
    i modulo N, with its slots, and nowhere else. A step sends the ids of a batch to the rows'
    owners, each id once for each process, gets the rows, and sends their gradients back. The
    optimizer must be one of those that compute each number on its own, or of tfdml's:
    `RowWiseAdagrad`, `LazyAdam`, `LARS` and `LAMB`. `layer.embeddings` and `get_weights` give this
    process's rows alone.

    Args:
        optimizer_state: Whether the optimizer's slots are divided.
        embeddings: Whether large embedding tables are divided.
        min_embedding_bytes: Bytes of a table from which on it is divided; smaller tables are whole
            on every process.
        row_codec: Encoding of the rows of divided tables, and of their gradients, on the way
            between processes: "bfloat16" sends 2 bytes for each number, "int8" one byte, and 4 for
            each row. Rows are rounded to the nearest, and nothing is fed back. None sends them as
            they are.
        replicated: For `tfdml.elastic`: whether each commit has a process's part twice, its own
            and a copy on the next process. Training then goes on in memory when a process is lost,
            or several that do not follow each other; otherwise only from a checkpoint on disk.

    Reference:
        Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
        arXiv:1910.02054.
    """

    optimizer_state: bool = True
    replicated: bool = False
    embeddings: bool = False
    min_embedding_bytes: int = 64 << 20
    row_codec: str | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        for name in ("optimizer_state", "replicated", "embeddings"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"`{name}` must be True or False. Received: {name}={value!r}.")
        least = self.min_embedding_bytes
        if not isinstance(least, int) or isinstance(least, bool) or least < 0:
            raise ValueError(
                f"`min_embedding_bytes` must be a number of bytes, 0 or more. Received: "
                f"min_embedding_bytes={least!r}. Use for example {64 << 20}, the default."
            )
        if self.row_codec not in ROW_CODEC_NAMES:
            raise ValueError(
                f"`row_codec` must be one of {', '.join(map(repr, ROW_CODEC_NAMES))}. Received: "
                f"row_codec={self.row_codec!r}."
            )
        if self.row_codec is not None and not self.embeddings:
            raise ValueError(
                f"`row_codec` must be None without `embeddings=True`, because no rows are sent. "
                f"Received: row_codec={self.row_codec!r}. `compression` of the strategy encodes "
                f"gradients of variables that are not divided."
            )
