"""Sizes of the models that all candidates of `tools.bench.pipeline` train.

Neither TensorFlow nor PyTorch is imported here: a process has one of them.
"""

from typing import NamedTuple

MICROBATCHES, RATE = 16, 1e-4
# Words of the transformer, and its heads.
WORDS, HEADS = 256, 4


class Sizes(NamedTuple):
    """Sizes of a model, and of its batches.

    Attributes:
        blocks: Number of equal blocks: of dense layers with ReLU, or of a transformer.
        width: Numbers that a block passes on for each row or token.
        rows: Rows of a batch.
        length: Tokens of a row; 0 for dense layers.
    """

    blocks: int
    width: int
    rows: int
    length: int = 0

    @property
    def parameters(self) -> int:
        """Number of the model's parameters."""
        dense = self.width * self.width + self.width
        if not self.length:
            return self.blocks * dense
        block = 12 * self.width * self.width + 13 * self.width
        head = self.width * WORDS + WORDS
        return WORDS * self.width + self.blocks * block + 2 * self.width + head


# "activations" is dense, too, with activations far larger than its weights.
MODELS = {
    "mlp": Sizes(8, 512, 1024),
    "transformer": Sizes(4, 256, 64, 32),
    "activations": Sizes(8, 256, 32_768),
}
# They only show that everything runs.
TINY = {
    "mlp": Sizes(4, 16, 32),
    "transformer": Sizes(4, 16, 32, 4),
    "activations": Sizes(4, 16, 64),
}


def sizes_of(model: str, tiny: bool) -> Sizes:
    """Returns the sizes of a model."""
    return (TINY if tiny else MODELS)[model]
