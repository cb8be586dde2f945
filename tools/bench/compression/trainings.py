"""The trainings that show what a codec costs: a network on images, a transformer on text.

Both are those of a recipe. Every codec trains by its name, so with its documented defaults.
"""

import statistics
from collections.abc import Callable, Sequence

import keras

import tfdml
from tools.bench.figures import spread

Schedule = keras.optimizers.schedules.LearningRateSchedule
# Makes an optimizer, given a schedule with a highest rate.
MakeOptimizer = Callable[[Callable[[float], Schedule]], keras.Optimizer]

MOMENTUM = "SGD, momentum 0.9"


def in_scope(
    codec: str, make: Callable[[], keras.Model], optimizer: Callable[[], keras.Optimizer], metrics
) -> keras.Model:
    """Returns a compiled model in the scope of a strategy with a codec."""
    with tfdml.HorovodStrategy(compression=None if codec == "none" else codec).scope():
        model = make()
        model.compile(
            optimizer(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=metrics,
        )
    return model


class Images:
    """The small network of `recipes/large_batch.py` on Fashion-MNIST.

    Attributes:
        optimizers: Optimizers by name. Their learning rates work without compression: plain SGD
            diverges at 0.5.
    """

    optimizers: dict[str, MakeOptimizer] = {
        "SGD": lambda rate: keras.optimizers.SGD(rate(0.3)),
        MOMENTUM: lambda rate: keras.optimizers.SGD(rate(0.05), momentum=0.9),
        "SGD, Nesterov 0.9": lambda rate: keras.optimizers.SGD(
            rate(0.05), momentum=0.9, nesterov=True
        ),
        "Adam": lambda rate: keras.optimizers.Adam(rate(0.004)),
    }
    rows, batch, epochs = 20_000, 128, 6
    steps = epochs * -(-rows // batch)
    noted = "compression_accuracy.json"

    @property
    def data(self) -> str:
        """Description of the data and of the result."""
        import images

        return f"{images.load().name}, {self.rows:,} images; validation accuracy in percent"

    def history(
        self,
        optimizer: str,
        codec: str,
        seed: int,
        callbacks: list[keras.callbacks.Callback] | None = None,
    ) -> dict[str, list[float]]:
        """Trains once in this rank; returns the history of `fit`, one entry per epoch.

        Args:
            optimizer: One of `optimizers`; its learning rate falls to 0.
            codec: Name of a compressor, or "none".
            seed: Seed of the initial weights and the order of the images.
            callbacks: Callbacks of `fit`.
        """
        import images
        import large_batch

        data = images.load().limited(self.rows)
        keras.utils.set_random_seed(seed)
        model = in_scope(
            codec,
            lambda: large_batch.build_model(data.x.shape[1:], classes=10),
            lambda: self.optimizers[optimizer](self.schedule),
            ["accuracy"],
        )
        return model.fit(
            data.x, data.y, batch_size=self.batch, epochs=self.epochs,
            validation_data=(data.x_val, data.y_val), validation_batch_size=2000,
            callbacks=callbacks, verbose=0,
        ).history  # fmt: skip

    def schedule(self, rate: float) -> Schedule:
        """Returns a learning rate that falls from `rate` to 0 in a training."""
        return keras.optimizers.schedules.PolynomialDecay(rate, self.steps, 0.0)

    def result(self, optimizer: str, codec: str, seed: int) -> float:
        """Trains once; returns the validation accuracy."""
        return self.history(optimizer, codec, seed)["val_accuracy"][-1]

    @staticmethod
    def cell(values: Sequence[float], base: Sequence[float] | None, allowed: float) -> str:
        """Returns results and their difference to no compression as text.

        Args:
            values: Results of all seeds.
            base: Those without compression; None if these are they.
            allowed: Largest loss in points; a larger one is in bold.
        """
        if base is None:
            return spread(list(values))
        lost = 100 * (statistics.mean(values) - statistics.mean(base))
        text = f"{lost:+.2f}" if lost >= -allowed else f"**{lost:+.2f}**"
        return f"{spread(list(values))} {text}"


class Text:
    """The transformer of `recipes/transformer.py` on Python's standard library, smaller.

    Attributes:
        optimizers: Optimizers by name, with the gradients' norm clipped. Their learning rates are
            the best of a search without compression.
    """

    optimizers: dict[str, MakeOptimizer] = {
        "Adam": lambda rate: keras.optimizers.Adam(rate(0.008), global_clipnorm=1.0),
        MOMENTUM: lambda rate: keras.optimizers.SGD(rate(0.3), momentum=0.9, global_clipnorm=1.0),
    }
    characters, width, batch, epochs = 1_000_000, 64, 32, 1
    noted = "compression_text.json"

    @property
    def data(self) -> str:
        """Description of the data and of the result."""
        return (
            f"Python's standard library, {self.characters:,} characters; bits per character of "
            f"text not seen, less is better"
        )

    @property
    def steps(self) -> int:
        """Number of steps of a training."""
        _, _, rows = self.samples()
        return self.epochs * -(-rows // self.batch)

    def result(self, optimizer: str, codec: str, seed: int) -> float:
        """Trains once; returns the bits per character.

        Args:
            optimizer: One of `optimizers`; its learning rate rises, and falls to 0.
            codec: Name of a compressor, or "none".
            seed: Seed of the initial weights and the order of the samples.
        """
        import transformer

        (x, y, classes), held_out, _ = self.samples()
        keras.utils.set_random_seed(seed)
        model = in_scope(
            codec,
            lambda: transformer.build_model(classes, self.width),
            lambda: self.optimizers[optimizer](self.schedule),
            [transformer.BitsPerCharacter()],
        )
        return model.fit(
            x[held_out:], y[held_out:], batch_size=self.batch, epochs=self.epochs,
            validation_data=(x[:held_out], y[:held_out]), validation_batch_size=256, verbose=0,
        ).history["val_bits"][-1]  # fmt: skip

    def schedule(self, rate: float) -> Schedule:
        """Returns a learning rate that rises to `rate` in a tenth of a training, and falls to 0."""
        falling = keras.optimizers.schedules.CosineDecay(rate, self.steps)
        return tfdml.schedules.LinearWarmup(falling, self.steps // 10)

    def samples(self) -> tuple[tuple, int, int]:
        """Returns samples with their number of classes, how many are held out, and the others'."""
        import transformer

        found = transformer.samples(transformer.read_text(self.characters))
        held_out = len(found[0]) // 20
        return found, held_out, len(found[0]) - held_out

    @staticmethod
    def cell(values: Sequence[float], base: Sequence[float] | None, allowed: float) -> str:
        """Returns results and their difference to no compression as text; see `Images.cell`."""
        del allowed
        mean = statistics.mean(values)
        text = f"{mean:.3f} ({min(values):.3f}–{max(values):.3f})"
        return text if base is None else f"{text} {100 * (mean / statistics.mean(base) - 1):+.1f} %"


TRAININGS = {"images": Images(), "text": Text()}
