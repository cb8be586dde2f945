"""The calls of TensorFlow's tutorial "Custom training with tf.distribute.Strategy", in order.

(custom_training.ipynb.) The images are scikit-learn's digits; files go to the working directory.
"""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

tf.keras.utils.set_random_seed(1)
images, labels = load_digits(return_X_y=True)
images = (images / 16).reshape(-1, 8, 8, 1).astype(np.float32)

strategy = tf.distribute.MirroredStrategy([d.name for d in tf.config.list_logical_devices("CPU")])
GLOBAL_BATCH_SIZE = 64
slices = tf.data.Dataset.from_tensor_slices((images[:640], labels[:640]))
train_dataset = slices.shuffle(640, seed=2).batch(GLOBAL_BATCH_SIZE)
test_dataset = tf.data.Dataset.from_tensor_slices((images[640:800], labels[640:800])).batch(32)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)


def create_model():
    regularizer = tf.keras.regularizers.L2(1e-3)
    return tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(8, 3, activation="relu", kernel_regularizer=regularizer),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10, kernel_regularizer=regularizer),
        ]
    )


with strategy.scope():
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def compute_loss(labels, predictions, model_losses):
        loss = tf.nn.compute_average_loss(loss_object(labels, predictions))
        if model_losses:
            loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
        return loss

    test_loss = tf.keras.metrics.Mean(name="test_loss")
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
    model = create_model()
    optimizer = tf.keras.optimizers.Adam(learning_rate=0.01)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)


def train_step(inputs):
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions, model.losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs):
    images, labels = inputs
    predictions = model(images, training=False)
    test_loss.update_state(loss_object(labels, predictions))
    test_accuracy.update_state(labels, predictions)


@tf.function
def distributed_train_step(dataset_inputs):
    per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


@tf.function
def distributed_test_step(dataset_inputs):
    return strategy.run(test_step, args=(dataset_inputs,))


epochs = []
for epoch in range(2):
    total_loss = 0.0
    num_batches = 0
    for x in train_dist_dataset:
        total_loss += distributed_train_step(x)
        num_batches += 1
    for x in test_dist_dataset:
        distributed_test_step(x)
    if epoch % 2 == 0:
        checkpoint.save("checkpoints/ckpt")
    metrics = (train_accuracy, test_loss, test_accuracy)
    epochs.append([float(total_loss / num_batches), *(float(m.result()) for m in metrics)])
    for metric in metrics:
        metric.reset_state()

# On one device, from the checkpoint of the first epoch.
eval_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
new_model = create_model()
new_optimizer = tf.keras.optimizers.Adam()
restored = tf.train.Checkpoint(optimizer=new_optimizer, model=new_model)
restored.restore(tf.train.latest_checkpoint("checkpoints"))


@tf.function
def eval_step(images, labels):
    eval_accuracy.update_state(labels, new_model(images, training=False))


for images_, labels_ in test_dataset:
    eval_step(images_, labels_)

# With an iterator.
train_iter = iter(train_dist_dataset)
by_iterator = [float(distributed_train_step(next(train_iter))) for _ in range(5)]


# Inside of a `tf.function`.
@tf.function
def distributed_train_epoch(dataset):
    total_loss = 0.0
    num_batches = 0
    for x in dataset:
        per_replica_losses = strategy.run(train_step, args=(x,))
        total_loss += strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)
        num_batches += 1
    return total_loss / tf.cast(num_batches, dtype=tf.float32)


train_accuracy.reset_state()
in_function = [float(distributed_train_epoch(train_dist_dataset)), float(train_accuracy.result())]

outcome = {
    "epochs": epochs,
    "restored": float(eval_accuracy.result()),
    "by_iterator": by_iterator,
    "in_function": in_function,
    "steps": int(optimizer.iterations.numpy()),
    "weights": model.get_weights(),
}
