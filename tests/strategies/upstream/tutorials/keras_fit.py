"""The calls of TensorFlow's tutorial "Distributed training with Keras" (keras.ipynb), in order.

The images are scikit-learn's digits; files go to the working directory.
"""

import pathlib

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

tf.keras.utils.set_random_seed(1)
images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype(np.float32)
train = tf.data.Dataset.from_tensor_slices((images[:640], labels[:640]))
test = tf.data.Dataset.from_tensor_slices((images[640:800], labels[640:800]))

strategy = tf.distribute.MirroredStrategy([d.name for d in tf.config.list_logical_devices("CPU")])
print(f"Number of devices: {strategy.num_replicas_in_sync}")
BATCH_SIZE_PER_REPLICA = 64 // strategy.num_replicas_in_sync
BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync


def scale(image, label):
    return tf.cast(image, tf.float32) / 16, label


train_dataset = (
    train.map(scale).cache().shuffle(640, seed=2, reshuffle_each_iteration=False).batch(BATCH_SIZE)
)
eval_dataset = test.map(scale).batch(BATCH_SIZE)

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(8, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(learning_rate=0.01),
        metrics=["accuracy"],
    )


def decay(epoch):
    return 1e-2 if epoch < 2 else 1e-3


class NoteRate(tf.keras.callbacks.Callback):
    """Records the learning rate of each epoch."""

    rates = []

    def on_epoch_end(self, epoch, logs=None):
        self.rates.append(float(model.optimizer.learning_rate.numpy()))


callbacks = [
    tf.keras.callbacks.TensorBoard(log_dir="logs"),
    tf.keras.callbacks.ModelCheckpoint(
        "checkpoints/{epoch:04d}.weights.h5", save_weights_only=True
    ),
    tf.keras.callbacks.LearningRateScheduler(decay),
    NoteRate(),
]
history = model.fit(train_dataset, epochs=3, callbacks=callbacks)

latest = sorted(pathlib.Path("checkpoints").glob("*"))[-1]
model.load_weights(latest)
evaluated = model.evaluate(eval_dataset)

model.save("model.keras")
fresh = {
    "loss": tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "metrics": ["accuracy"],
}
unreplicated_model = tf.keras.models.load_model("model.keras")
unreplicated_model.compile(optimizer=tf.keras.optimizers.Adam(), **fresh)
alone = unreplicated_model.evaluate(eval_dataset)
with strategy.scope():
    replicated_model = tf.keras.models.load_model("model.keras")
    replicated_model.compile(optimizer=tf.keras.optimizers.Adam(), **fresh)
    replicated = replicated_model.evaluate(eval_dataset)

outcome = {
    "history": history.history,
    "rates": NoteRate.rates,
    "steps": int(model.optimizer.iterations.numpy()),
    "evaluated": [evaluated, alone, replicated],
    "weights": [np.array(w) for w in model.get_weights()],
}
