"""The calls of TensorFlow's tutorial "Save and load a model using a distribution strategy".

(save_and_load.ipynb.) The images are scikit-learn's digits; files go to the working directory.
"""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

tf.keras.utils.set_random_seed(1)
DEVICES = [device.name for device in tf.config.list_logical_devices("CPU")]
mirrored_strategy = tf.distribute.MirroredStrategy(DEVICES)
images, labels = load_digits(return_X_y=True)
images = (images / 16).reshape(-1, 8, 8, 1).astype(np.float32)
slices = tf.data.Dataset.from_tensor_slices((images[:320], labels[:320]))
train_dataset = slices.cache().shuffle(320, seed=2, reshuffle_each_iteration=False).batch(32)
eval_dataset = tf.data.Dataset.from_tensor_slices((images[320:384], labels[320:384])).batch(32)


def get_model():
    with mirrored_strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.Input((8, 8, 1)),
                tf.keras.layers.Conv2D(4, 3, activation="relu"),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(10),
            ]
        )
        model.compile(
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=tf.keras.optimizers.Adam(),
            metrics=[tf.keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        )
        return model


model = get_model()
first = model.fit(train_dataset, epochs=2)
weights = model.get_weights()
model.save("model.keras")

restored_model = tf.keras.models.load_model("model.keras")
outside = restored_model.fit(train_dataset)
another_strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
with another_strategy.scope():
    restored_on_one = tf.keras.models.load_model("model.keras")
    on_one = restored_on_one.fit(train_dataset)

tf.saved_model.save(model, "saved_model")
loaded = tf.saved_model.load("saved_model")
inference_func = loaded.signatures["serving_default"]
predict_dataset = eval_dataset.map(lambda image, label: image)
batch = next(iter(predict_dataset))
(alone,) = inference_func(batch).values()

another_strategy = tf.distribute.MirroredStrategy(DEVICES)
with another_strategy.scope():
    loaded = tf.saved_model.load("saved_model")
    inference_func = loaded.signatures["serving_default"]
    dist_predict_dataset = another_strategy.experimental_distribute_dataset(predict_dataset)
    for batch in dist_predict_dataset:
        (result,) = another_strategy.run(inference_func, args=(batch,)).values()
        replicated = np.concatenate(
            [rows.numpy() for rows in another_strategy.experimental_local_results(result)]
        )
        break

model.export("exported")
exported = tf.saved_model.load("exported")
served = exported.serve(next(iter(predict_dataset))).numpy()


class SubclassedModel(tf.keras.Model):
    """A model that is built by its first batch."""

    def __init__(self):
        super().__init__()
        self.dense = tf.keras.layers.Dense(5)

    def call(self, inputs):
        return self.dense(inputs)


subclassed = SubclassedModel()  # Outside of the scope: it trains on one device.
rows = tf.data.Dataset.from_tensors((tf.range(5.0), tf.range(5.0))).repeat(100).batch(8)
subclassed.compile(optimizer="adam", loss="mean_squared_error")
of_subclassed = subclassed.fit(rows, epochs=2)
tf.saved_model.save(subclassed, "subclassed")

outcome = {
    "histories": [h.history for h in (first, outside, on_one, of_subclassed)],
    "predicted": [alone.numpy(), replicated, served],
    "weights": weights,
}
