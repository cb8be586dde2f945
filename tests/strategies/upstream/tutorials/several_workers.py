"""The calls of TensorFlow's tutorial "Multi-worker training with Keras", in order.

(multi_worker_with_keras.ipynb.) The images are scikit-learn's digits; files go to the working
directory, which all workers share.
"""

import json
import os

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

global_batch_size = 64
cluster = json.loads(os.environ.get("TF_CONFIG", "{}")).get("cluster", {"worker": ["this"]})
per_worker_batch_size = global_batch_size // len(cluster["worker"])

strategy = tf.distribute.MultiWorkerMirroredStrategy()
tf.keras.utils.set_random_seed(1)


def digits_dataset(batch_size):
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32).reshape(-1, 8, 8)
    slices = tf.data.Dataset.from_tensor_slices((x, y.astype(np.int64)))
    return slices.shuffle(2000, seed=3).repeat().batch(batch_size)


def build_and_compile_cnn_model():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.InputLayer(shape=(8, 8)),
            tf.keras.layers.Reshape(target_shape=(8, 8, 1)),
            tf.keras.layers.Conv2D(8, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.05),
        metrics=["accuracy"],
    )
    return model


dataset = digits_dataset(per_worker_batch_size * len(cluster["worker"]))
with strategy.scope():
    model = build_and_compile_cnn_model()
checkpoints = [tf.keras.callbacks.ModelCheckpoint("epoch{epoch}.keras")]
first = model.fit(dataset, epochs=2, steps_per_epoch=10, callbacks=checkpoints)

options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
with strategy.scope():
    of_own_parts = build_and_compile_cnn_model()
not_sharded = of_own_parts.fit(dataset.with_options(options), steps_per_epoch=5)


def is_chief(task_type, task_id):
    return (task_type == "worker" and task_id == 0) or task_type is None


def write_filepath(filepath, task_type, task_id):
    directory, base = os.path.split(filepath)
    if not is_chief(task_type, task_id):
        directory = os.path.join(directory, f"workertemp_{task_id}")
        tf.io.gfile.makedirs(directory)
    return os.path.join(directory, base)


resolver = strategy.cluster_resolver
task_type, task_id = resolver.task_type, resolver.task_id
write_model_path = write_filepath("model.keras", task_type, task_id)
model.save(write_model_path)
if not is_chief(task_type, task_id):
    tf.io.gfile.rmtree(os.path.dirname(write_model_path))

checkpoint = tf.train.Checkpoint(model=model)
write_checkpoint_dir = write_filepath("ckpt", task_type, task_id)
manager = tf.train.CheckpointManager(checkpoint, directory=write_checkpoint_dir, max_to_keep=1)
manager.save()
if not is_chief(task_type, task_id):
    tf.io.gfile.rmtree(write_checkpoint_dir)
after_saving = model.fit(dataset, steps_per_epoch=3)
# All workers see the chief's files once all have reached this point.
checkpoint.restore(tf.train.latest_checkpoint("ckpt"))
restored = model.fit(dataset, steps_per_epoch=3)
with strategy.scope():
    loaded = tf.keras.models.load_model("model.keras")
loaded_history = loaded.fit(dataset, epochs=2, steps_per_epoch=3)


def backed_up(**when):
    with strategy.scope():
        model = build_and_compile_cnn_model()
    callbacks = [tf.keras.callbacks.BackupAndRestore(backup_dir="backup", **when)]
    return model.fit(dataset, epochs=2, steps_per_epoch=6, callbacks=callbacks)


by_epoch = backed_up()
by_steps = backed_up(save_freq=4)

outcome = {
    "histories": [
        h.history for h in (first, after_saving, restored, loaded_history, by_epoch, by_steps)
    ],
    "not_sharded": not_sharded.history,
    "steps": int(model.optimizer.iterations.numpy()),
    "weights": [*model.get_weights(), *loaded.get_weights()],
}
