"""Cases run by ranks: custom steps and loops."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.harness import rank_job
from tests.strategies.cases import data, dense_model, outcome, seed_ranks_apart


class Adversaries(keras.Model):
    """Two networks with one optimizer each, and a custom `train_step`."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([layers.Input((6,)), layers.Dense(6)])
        self.critic = keras.Sequential([layers.Input((6,)), layers.Dense(1)])
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def compile(self, generator_optimizer, critic_optimizer):
        """Sets both optimizers."""
        super().compile()
        self.generator_optimizer = generator_optimizer
        self.critic_optimizer = critic_optimizer

    def call(self, inputs):
        """Returns the critic's output for the generator's output."""
        return self.critic(self.generator(inputs))

    def train_step(self, batch):
        """Trains the critic, then the generator."""
        real = batch[0] if isinstance(batch, tuple) else batch
        with tf.GradientTape() as tape:
            fake = self.generator(real * 0.5, training=True)
            verdicts = tf.concat([self.critic(real), self.critic(fake)], 0)
            truth = tf.concat([tf.ones_like(real[:, :1]), tf.zeros_like(real[:, :1])], 0)
            critic_loss = self.loss_fn(truth, verdicts)
        variables = self.critic.trainable_variables
        self.critic_optimizer.apply_gradients(
            zip(tape.gradient(critic_loss, variables), variables, strict=True)
        )
        with tf.GradientTape() as tape:
            opinion = self.critic(self.generator(real * 0.5, training=True))
            generator_loss = self.loss_fn(tf.ones_like(opinion), opinion)
        variables = self.generator.trainable_variables
        self.generator_optimizer.apply_gradients(
            zip(tape.gradient(generator_loss, variables), variables, strict=True)
        )
        return {"critic_loss": critic_loss, "generator_loss": generator_loss}


def several_optimizers() -> dict:
    """Trains with two optimizers in a `train_step`; `keras.losses` give exact means."""
    x, _ = data(50)
    with rank_job.strategy().scope():
        seed_ranks_apart()
        model = Adversaries()
        model.compile(keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01))
    model.fit(x, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return outcome(model)


def custom_loop() -> dict:
    """Trains in a custom loop: `run`, `reduce`, `gather` and a distributed dataset."""
    x, y = data(48)
    strategy = rank_job.strategy()
    with strategy.scope():
        seed_ranks_apart()
        model = dense_model()
        optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.5)
        optimizer.build(model.trainable_variables)
    batches = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    )
    function = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = function(y, model(x, training=True)) / 12
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, x

    @tf.function
    def step(batch):
        loss, x = strategy.run(replica_step, args=batch)
        return strategy.reduce("SUM", loss, axis=None), strategy.gather(x, axis=0)

    losses, rows = zip(*[step(batch) for batch in batches], strict=True)
    return {**outcome(model), "losses": np.array(losses), "rows": np.concatenate(rows)}
