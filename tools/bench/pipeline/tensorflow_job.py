"""Candidates of `tools.bench.pipeline` in TensorFlow: tfdml under `fit`, and hand-written loops.

Process 0 has all candidates. Process 1 trains when two jobs run at once.
"""

import argparse
import time

from tools.bench.harness import report
from tools.bench.pipeline import turns
from tools.bench.pipeline.sizes import MICROBATCHES, Sizes, sizes_of
from tools.bench.pipeline.turns import Candidate, Made

ONE, TWO = (0,), (0, 1)
PLAIN, ONE_STAGE, BOTH = "plain fit, whole batch", "one stage", "two jobs at once"
STAGES = {
    "two stages, 1f1b": (2, "1f1b"),
    "two stages, gpipe": (2, "gpipe"),
    "four stages, 1f1b": (4, "1f1b"),
    "four stages, gpipe": (4, "gpipe"),
}
LOOPS = {
    "loop, one core, whole batch": (ONE, 1),
    "loop, tf.device, whole batch": (TWO, 1),
    "loop, one core": (ONE, MICROBATCHES),
    "loop, tf.device": (TWO, MICROBATCHES),
}

# The one-core run with which each is compared.
BASES = {name: ONE_STAGE for name in (ONE_STAGE, *STAGES, BOTH, PLAIN)} | {
    name: "loop, one core" if parts > 1 else "loop, one core, whole batch"
    for name, (_, parts) in LOOPS.items()
}


def names(model: str) -> list[str]:
    """Returns the names of the candidates for a model, in order."""
    if model == "activations":
        return [ONE_STAGE, *STAGES]
    return [ONE_STAGE, *list(STAGES)[:2], BOTH, PLAIN, *LOOPS]


def make(rank: int, model: str, tiny: bool, layers: list[list[str]]) -> Made:
    """Returns the candidates in which a process takes part.

    Args:
        rank: Number of the process.
        model: Name of the model.
        tiny: Whether it is tiny.
        layers: Names of the layers of the two stages.
    """
    import tensorflow as tf

    from tools.bench.pipeline.device_loop import device_loop

    sizes = sizes_of(model, tiny)
    (device,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * 4)
    if rank == 1:
        return {BOTH: Candidate(_fit(sizes, model, 1, "1f1b"), (1,))}
    made = {ONE_STAGE: Candidate(_fit(sizes, model, 1, "1f1b"), ONE)}
    for name in set(names(model)) & set(STAGES):
        count, schedule = STAGES[name]
        run = _fit(sizes, model, count, schedule, layers if count == 2 else None)
        made[name] = Candidate(run, TWO)
    if model == "activations":
        return made
    made[BOTH] = made[ONE_STAGE]
    made[PLAIN] = Candidate(_fit(sizes, model), ONE)
    for name, (cores, parts) in LOOPS.items():
        devices = [f"CPU:{core}" for core in (cores * 2)[:2]]
        step = device_loop(sizes, devices, parts)
        made[name] = Candidate(lambda steps, step=step: turns.timed(step, steps), cores)
    return made


def _fit(sizes: Sizes, name: str, stages: int = 0, schedule: str = "", layers=None):
    """Returns a function that trains for some steps, and returns the seconds of each.

    Args:
        sizes: Sizes of the model and of a batch.
        name: The model's name.
        stages: Number of stages; 0 for Keras without a strategy, and the whole batch at once.
        schedule: The pipeline's schedule.
        layers: Names of the layers of each stage; by default, they are cut by measured times.
    """
    import keras
    import tensorflow as tf

    import tfdml
    from tools.bench.pipeline import keras_models

    keras.utils.clear_session()  # Names of layers begin anew.
    if stages:
        pipeline = tfdml.PipelineParallel(MICROBATCHES, schedule, stages=layers)
        devices = [[f"CPU:{number}" for number in range(stages)]]
        with tfdml.MirroredStrategy(devices=devices, pipeline=pipeline).scope():
            model = keras_models.compiled(sizes, name)
    else:
        model = keras_models.compiled(sizes, name)
    if model.count_params() != sizes.parameters:
        raise RuntimeError(
            f"The model must have {sizes.parameters} parameters, as in the other libraries. "
            f"Received: {model.count_params()}."
        )
    dataset = tf.data.Dataset.from_tensors(keras_models.batch(sizes))

    class Clock(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.begin = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            seconds.append(time.perf_counter() - self.begin)

    seconds: list[float] = []

    def run(steps: int) -> list[float]:
        seconds.clear()
        model.fit(dataset.repeat(steps), shuffle=False, verbose=0, callbacks=[Clock()])
        return list(seconds)

    return run


def planned(model: str, tiny: bool) -> dict:
    """Returns the plan of two stages: its text, numbers, and the layers of each stage.

    Layers are timed on one core.
    """
    turns.pin(ONE)
    import tfdml
    from tools.bench.pipeline import keras_models

    sizes = sizes_of(model, tiny)
    built = keras_models.compiled(sizes, model)
    plan = tfdml.PipelineParallel(MICROBATCHES).plan(built, sizes.rows, num_stages=2)
    return {
        "text": str(plan),
        "speedup": plan.speedup,
        "bubble": plan.bubble,
        "seconds": plan.step_seconds,
        "layers": [list(stage.layers) for stage in plan.stages],
    }


def main(part: str, model: str, steps: int, rounds: int, tiny: bool, layers: str) -> None:
    """Measures a model's candidates, or plans it; reports the results."""
    if part == "plan":
        return report(planned(model, tiny))
    stages = [stage.split(",") for stage in layers.split(";")] if layers else None
    report(turns.measure(make, names(model), steps, rounds, model, tiny, stages))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["plan", "turns"], help="What is done.")
    parser.add_argument("model", help='"mlp", "transformer" or "activations".')
    parser.add_argument("--steps", type=int, default=3, help="Steps of a turn.")
    parser.add_argument("--rounds", type=int, default=3, help="Turns of each candidate.")
    parser.add_argument("--layers", default="", help="Layers of the stages: one,two;three.")
    parser.add_argument("--tiny", action="store_true", help="Tiny sizes.")
    main(**vars(parser.parse_args()))
