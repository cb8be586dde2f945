"""Trains on scikit-learn's digits with a custom loop instead of `fit`.

    python recipes/own_loop.py
    horovodrun -np 2 python recipes/own_loop.py

`strategy.run` follows TensorFlow's convention: a replica computes its part of the global batch's
value, and the parts are summed. So the loss is divided by the rows of the global batch.
"""

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdml

BATCH = 128


def main() -> None:
    """Train, and say how many digits of the test set are read rightly."""
    keras.utils.set_random_seed(0)
    digits = load_digits()
    images = (digits.data / 16).astype("float32")
    x, test_x, y, test_y = train_test_split(images, digits.target, test_size=0.25, random_state=0)
    strategy = tfdml.HorovodStrategy()
    with strategy.scope():
        hidden = layers.Dense(64, activation="relu")
        model = keras.Sequential([layers.Input((64,)), hidden, layers.Dense(10)])
        optimizer = keras.optimizers.Adam(3e-3)
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_of_rows = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    # Every process reads the same global batches, shuffled by the same seed, and gets its rows.
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1)
    batches = strategy.experimental_distribute_dataset(dataset.batch(BATCH))

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = loss_of_rows(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(batch: tuple) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    for epoch in range(1, 11):
        losses = [float(step(batch)) for batch in batches]
        if strategy.is_chief:
            print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}")
    with strategy.scope():
        accuracy.update_state(test_y, model.predict(test_x, verbose=0))
        # All ranks must read it: outside of `fit`, reading a metric sums it over the ranks.
        reached = float(accuracy.result())
    if strategy.is_chief:
        print(f"test accuracy: {reached:.3f}")


if __name__ == "__main__":
    main()
