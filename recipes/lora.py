"""Fine-tunes a model of KerasHub with LoRA, and sends compressed gradients.

    pip install keras-hub
    python recipes/lora.py
    tfdml launch --workers 2 recipes/lora.py --compression int8

LoRA freezes a model's weights and adds small matrices to some of them, so little is left to send,
and a codec makes that smaller. Real use begins with published weights, as in
`GPT2CausalLM.from_preset("gpt2_base_en")`. This recipe needs no download: a small GPT-2 with random
weights learns source code first. LoRA then tunes it to prose, Python's language reference.
"""

from pydoc_data.topics import topics
from typing import Annotated

import keras
import keras_hub
import numpy as np
import typer
from transformer import BitsPerCharacter, read_text

import tfdml

LENGTH = 64  # Characters of a sample.
BYTES = 256  # Each is a token.


def samples(text: bytes) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns a text as KerasHub's decoders read it, and the characters that follow.

    Args:
        text: The text.

    Returns:
        `token_ids` and `padding_mask` by name, and the targets, all int32 of shape (n, LENGTH).
    """
    codes = np.frombuffer(text, np.uint8).astype("int32")
    rows = (len(codes) - 1) // LENGTH
    tokens, following = (codes[i : i + rows * LENGTH].reshape(rows, LENGTH) for i in (0, 1))
    return {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}, following


def build_model() -> keras.Model:
    """Builds a small GPT-2 with random weights."""
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=BYTES,
        num_layers=2,
        num_heads=4,
        hidden_dim=96,
        intermediate_dim=384,
        dropout=0.0,  # Masks differ between replicas, and so would the results.
        max_sequence_length=LENGTH,
    )
    return keras_hub.models.GPT2CausalLM(backbone)


def compile_model(model: keras.Model, learning_rate: float) -> None:
    """Gives a model a new optimizer for the weights that are trained from now on."""
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[BitsPerCharacter()],
    )


def main(
    compression: Annotated[
        str, typer.Option(help=f"One of {', '.join(tfdml.compression.names())}.")
    ] = "int8",
    rank: Annotated[int, typer.Option(min=1, help="Rank of LoRA's matrices.")] = 8,
    characters: Annotated[int, typer.Option(min=10_000, help="Length of each text.")] = 300_000,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over each text.")] = 4,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a global batch.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the order.")] = 0,
) -> None:
    """Train a small GPT-2 on source code, and fine-tune it to prose with LoRA."""
    keras.utils.set_random_seed(seed)
    strategy = tfdml.MultiWorkerMirroredStrategy(compression=compression)
    code = samples(read_text(characters))
    prose = "\n".join(topics[name] for name in sorted(topics)).encode()
    held_out = samples(prose[: characters // 10])
    prose = samples(prose[characters // 10 : characters // 10 + characters])
    with strategy.scope():
        model = build_model()
        compile_model(model, learning_rate=2e-3)
    model.fit(*code, batch_size=batch_size, epochs=epochs)
    before = model.evaluate(*held_out, batch_size=batch_size, verbose=0, return_dict=True)
    weights = model.count_params()
    with strategy.scope():  # It creates weights.
        model.backbone.enable_lora(rank)
        compile_model(model, learning_rate=5e-3)
    model.fit(*prose, batch_size=batch_size, epochs=epochs, validation_data=held_out)
    after = model.evaluate(*held_out, batch_size=batch_size, verbose=0, return_dict=True)
    if strategy.is_chief:
        tuned = sum(int(np.prod(w.shape)) for w in model.trainable_weights)
        typer.echo(
            f"prose not seen: {after['bits']:.4f} bits per character, {before['bits']:.4f} before "
            f"LoRA; {tuned:,} weights tuned beside {weights:,}"
        )


if __name__ == "__main__":
    typer.run(main)
