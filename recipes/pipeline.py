"""Trains a transformer that is too large for the memory of one device, in stages on several.

    python recipes/pipeline.py --stages 2
    horovodrun -np 2 python recipes/pipeline.py --stages 2    # two replicas of two stages each

Each device may hold `--memory` megabytes of weights, gradients, slots and activations: the model
and Adam's slots are larger. With GPUs, their names are those of the stages; without, the stages are
on parts of the processor, which shows the numbers and the memory, but saves no time.
"""

from typing import Annotated

import keras
import numpy as np
import tensorflow as tf
import typer
from transformer import BitsPerCharacter, build_model, read_text, samples

import tfdml


def devices(stages: int) -> list[str]:
    """Returns the names of as many devices as there are stages."""
    if len(tf.config.list_physical_devices("GPU")) >= stages:
        return [f"GPU:{number}" for number in range(stages)]
    processor = tf.config.list_physical_devices("CPU")[0]
    if not tf.config.get_logical_device_configuration(processor):
        parts = [tf.config.LogicalDeviceConfiguration()] * stages
        tf.config.set_logical_device_configuration(processor, parts)
    return [f"CPU:{number}" for number in range(stages)]


def megabytes_on(model: keras.Model, device: str) -> float:
    """Returns the megabytes of weights and slots that are on a device."""
    variables = [*model.variables, *model.optimizer.variables]
    parts = [part for v in variables for part in v.value.values if part.device.endswith(device)]
    return sum(part.shape.num_elements() * part.dtype.size for part in parts) / 1e6


def main(
    stages: Annotated[int, typer.Option(min=2, help="Devices of a replica.")] = 2,
    memory: Annotated[float, typer.Option(help="Megabytes that each device may hold.")] = 42.0,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches of a step.")] = 16,
    schedule: Annotated[str, typer.Option(help="1f1b, or gpipe.")] = "1f1b",
    width: Annotated[int, typer.Option(min=4, help="Size of a position's vector.")] = 192,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of the transformer.")] = 6,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the text.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a global batch.")] = 32,
    characters: Annotated[int, typer.Option(min=10_000, help="Length of the text.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the order.")] = 0,
) -> None:
    """Train a transformer that is too large for one device, in stages on several."""
    keras.utils.set_random_seed(seed)
    x, y, classes = samples(read_text(characters))
    held_out = max(len(x) // 20, 1)
    pipeline = tfdml.PipelineParallel(microbatches, schedule, memory_limits=[memory * 1e6] * stages)
    group = devices(stages)
    strategy = tfdml.HorovodStrategy(devices=[group], pipeline=pipeline)
    with strategy.scope():
        model = build_model(classes, width, blocks)
        model.compile(
            keras.optimizers.Adam(1e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[BitsPerCharacter()],
        )
    if strategy.is_chief:
        typer.echo(f"{strategy.mesh}\n{pipeline.plan(model, batch_size)}")
    history = model.fit(
        x[held_out:],
        y[held_out:],
        batch_size=batch_size,
        epochs=epochs,
        validation_data=(x[:held_out], y[:held_out]),
        validation_batch_size=batch_size,
    ).history
    if strategy.is_chief:
        for name in group:
            typer.echo(f"{name}: {megabytes_on(model, name):.1f} MB of weights and slots")
        typer.echo(
            f"{history['val_bits'][-1]:.3f} bits per character of text not seen, "
            f"{np.log2(classes):.3f} for guessing among {classes}"
        )


if __name__ == "__main__":
    typer.run(main)
