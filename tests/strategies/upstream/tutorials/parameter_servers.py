"""The calls of TensorFlow's tutorial "Parameter server training", in order.

(parameter_server_training.ipynb.) Every task of the cluster in `TF_CONFIG` runs it; without one,
workers and servers are in this process. Files go to the working directory.
"""

import json
import os
import random
import socket

import numpy as np
import tensorflow as tf

NUM_WORKERS, NUM_PS = 2, 2


def create_in_process_cluster(num_workers, num_ps):
    sockets = [socket.create_server(("localhost", 0)) for _ in range(num_workers + num_ps)]
    addresses = [f"localhost:{s.getsockname()[1]}" for s in sockets]
    for listener in sockets:
        listener.close()
    cluster_spec = tf.train.ClusterSpec(
        {"worker": addresses[:num_workers], "ps": addresses[num_workers:]}
    )
    worker_config = tf.compat.v1.ConfigProto()
    worker_config.inter_op_parallelism_threads = num_workers + 1
    for i in range(num_workers):
        tf.distribute.Server(
            cluster_spec, job_name="worker", task_index=i, config=worker_config, protocol="grpc"
        )
    for i in range(num_ps):
        tf.distribute.Server(cluster_spec, job_name="ps", task_index=i, protocol="grpc")
    return tf.distribute.cluster_resolver.SimpleClusterResolver(cluster_spec, rpc_layer="grpc")


if "TF_CONFIG" in os.environ:
    cluster_resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
else:
    cluster_resolver = create_in_process_cluster(NUM_WORKERS, NUM_PS)
if cluster_resolver.task_type in ("worker", "ps"):
    server = tf.distribute.Server(
        cluster_resolver.cluster_spec(),
        job_name=cluster_resolver.task_type,
        task_index=cluster_resolver.task_id,
        protocol=cluster_resolver.rpc_layer or "grpc",
        start=True,
    )
    server.join()

variable_partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
    min_shard_bytes=(1 << 10), max_shards=NUM_PS
)
strategy = tf.distribute.ParameterServerStrategy(
    cluster_resolver, variable_partitioner=variable_partitioner
)

# Training with `Model.fit`.
x = tf.random.uniform((10, 10))
y = tf.reduce_sum(x, axis=1, keepdims=True)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(10).repeat().batch(8).prefetch(2)
with strategy.scope():
    fitted = tf.keras.models.Sequential([tf.keras.layers.Dense(1)])
    fitted.compile(tf.keras.optimizers.SGD(0.02), loss="mse", steps_per_execution=10)
callbacks = [
    tf.keras.callbacks.TensorBoard(log_dir="log"),
    tf.keras.callbacks.ModelCheckpoint(filepath="ckpt.keras"),
    tf.keras.callbacks.BackupAndRestore(backup_dir="backup"),
]
history = fitted.fit(dataset, epochs=3, steps_per_epoch=20, callbacks=callbacks)

# Training with a custom loop.
feature_vocab = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]
label_vocab = ["yes", "no"]
random.seed(1)
with strategy.scope():
    feature_lookup_layer = tf.keras.layers.StringLookup(vocabulary=feature_vocab, mask_token=None)
    label_lookup_layer = tf.keras.layers.StringLookup(
        vocabulary=label_vocab, num_oov_indices=0, mask_token=None
    )


def feature_and_label_gen(num_examples=200):
    examples = {"features": [], "label": []}
    for _ in range(num_examples):
        features = random.sample(feature_vocab, 3)
        examples["features"].append(features)
        examples["label"].append(["yes"] if "avenger" in features else ["no"])
    return examples


examples = feature_and_label_gen()


def preprocessed(raw):
    return raw.map(
        lambda x: (
            {"features": feature_lookup_layer(x["features"])},
            label_lookup_layer(x["label"]),
        )
    )


def dataset_fn(_):
    raw_dataset = tf.data.Dataset.from_tensor_slices(examples)
    return preprocessed(raw_dataset).shuffle(200).batch(32).repeat()


with strategy.scope():
    model_input = tf.keras.layers.Input(shape=(3,), dtype=tf.int64, name="features")
    emb_layer = tf.keras.layers.Embedding(
        input_dim=len(feature_lookup_layer.get_vocabulary()), output_dim=64
    )
    emb_output = tf.keras.ops.mean(emb_layer(model_input), axis=1)
    dense_output = tf.keras.layers.Dense(
        units=1, activation="sigmoid", kernel_regularizer=tf.keras.regularizers.L2(1e-4)
    )(emb_output)
    model = tf.keras.Model({"features": model_input}, dense_output)
    optimizer = tf.keras.optimizers.RMSprop(learning_rate=0.1)
    accuracy = tf.keras.metrics.Accuracy()
    eval_accuracy = tf.keras.metrics.Accuracy()


@tf.function
def step_fn(iterator):
    def replica_fn(batch_data, labels):
        with tf.GradientTape() as tape:
            pred = model(batch_data, training=True)
            per_example_loss = tf.keras.losses.BinaryCrossentropy(reduction="none")(labels, pred)
            loss = tf.nn.compute_average_loss(per_example_loss)
            model_losses = model.losses
            if model_losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        actual_pred = tf.cast(tf.greater(pred, 0.5), tf.int64)
        accuracy.update_state(labels, actual_pred)
        return loss

    batch_data, labels = next(iterator)
    losses = strategy.run(replica_fn, args=(batch_data, labels))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)


@tf.function
def per_worker_dataset_fn():
    return strategy.distribute_datasets_from_function(dataset_fn)


per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
per_worker_iterator = iter(per_worker_dataset)
accuracies = []
for _ in range(4):
    accuracy.reset_state()
    for _ in range(5):
        coordinator.schedule(step_fn, args=(per_worker_iterator,))
    coordinator.join()
    accuracies.append(float(accuracy.result().numpy()))
counted = float(accuracy.count.numpy())
loss = coordinator.schedule(step_fn, args=(per_worker_iterator,)).fetch()

# Evaluation on the chief, and on the workers.
eval_examples = feature_and_label_gen(num_examples=16)
on_chief = tf.keras.metrics.Accuracy()
for batch_data, labels in preprocessed(tf.data.Dataset.from_tensor_slices(eval_examples)).batch(8):
    pred = model(batch_data, training=False)
    on_chief.update_state(labels, tf.cast(tf.greater(pred, 0.5), tf.int64))


@tf.function
def eval_step(iterator):
    def replica_fn(batch_data, labels):
        pred = model(batch_data, training=False)
        eval_accuracy.update_state(labels, tf.cast(tf.greater(pred, 0.5), tf.int64))

    batch_data, labels = next(iterator)
    strategy.run(replica_fn, args=(batch_data, labels))


def eval_dataset_fn():
    raw_dataset = tf.data.Dataset.from_tensor_slices(eval_examples)
    return preprocessed(raw_dataset).shuffle(16).repeat().batch(8)


per_worker_eval_iterator = iter(coordinator.create_per_worker_dataset(eval_dataset_fn))
for _ in range(2):
    coordinator.schedule(eval_step, args=(per_worker_eval_iterator,))
coordinator.join()

outcome = {
    "loss": history.history["loss"],
    "fit_steps": int(fitted.optimizer.iterations.numpy()),
    "accuracies": accuracies,
    "counted": counted,
    "loop_loss": float(loss),
    "steps": int(optimizer.iterations.numpy()),
    "shards": [tuple(np.shape(w)) for w in tf.nest.flatten(emb_layer.embeddings.value.variables)],
    "evaluated": [float(on_chief.result()), float(eval_accuracy.result())],
}
print(json.dumps(outcome))
