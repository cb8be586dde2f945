"""Models with custom steps like the examples of keras.io, in a small size.

Random values (noise, times) are columns of the data here, because replicas draw different values.
All else is as in the examples: the means, the trackers, and the returned logs.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

WIDTH = 6


def _net(units: int, inputs: int = WIDTH) -> keras.Model:
    hidden = layers.Dense(5, activation="tanh")
    return keras.Sequential([layers.Input((inputs,)), hidden, layers.Dense(units)])


def _halves(data):
    """Returns a batch's two parts; the second replaces noise."""
    return ops.split(data, 2, axis=-1)


class _Classifier(keras.Model):
    """A small classifier."""

    labels = True

    def __init__(self):
        super().__init__()
        self.network = _net(3)

    def call(self, x):
        """Returns logits."""
        return self.network(x)


class VAE(keras.Model):
    """Custom means, three trackers, and log keys that differ from the trackers' names."""

    width = 2 * WIDTH

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = _net(2 * WIDTH), _net(WIDTH)
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        """Returns the trackers."""
        return [
            self.total_loss_tracker,
            self.reconstruction_loss_tracker,
            self.kl_loss_tracker,
        ]

    def train_step(self, data):
        """Returns the reconstruction."""
        data, noise = _halves(data)
        with tf.GradientTape() as tape:
            mean, log_var = ops.split(self.encoder(data), 2, axis=-1)
            reconstruction = self.decoder(mean + ops.exp(0.5 * log_var) * noise)
            reconstruction_loss = ops.mean(ops.sum(ops.square(data - reconstruction), axis=-1))
            kl_loss = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        grads = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "kl_loss": self.kl_loss_tracker.result(),
        }


class DCGAN(keras.Model):
    """Two optimizers, one `keras.losses` object, and trackers of its values."""

    width = 2 * WIDTH

    def __init__(self):
        super().__init__()
        self.discriminator, self.generator = _net(1), _net(WIDTH)

    def compile(self, optimizer):
        """Sets one optimizer per network."""
        super().compile()
        self.d_optimizer = optimizer
        self.g_optimizer = type(optimizer).from_config(optimizer.get_config())
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        """Returns the trackers."""
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, data):
        """Trains the discriminator, then the generator."""
        real_images, noise = _halves(data)
        batch_size = ops.shape(real_images)[0]
        generated_images = self.generator(noise)
        combined_images = ops.concatenate([generated_images, real_images], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        with tf.GradientTape() as tape:
            predictions = self.discriminator(combined_images)
            d_loss = self.loss_fn(labels, predictions)
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(
            zip(grads, self.discriminator.trainable_weights, strict=True)
        )
        misleading_labels = ops.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(misleading_labels, predictions)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class WGAN(DCGAN):
    """A gradient penalty: nested tapes, several updates per step, and losses as logs."""

    def gradient_penalty(self, real_images, fake_images):
        """Returns the penalty for gradients of the discriminator whose norm is not 1."""
        interpolated = real_images + 0.3 * (fake_images - real_images)
        with tf.GradientTape() as gp_tape:
            gp_tape.watch(interpolated)
            pred = self.discriminator(interpolated)
        grads = gp_tape.gradient(pred, [interpolated])[0]
        norm = ops.sqrt(ops.sum(ops.square(grads), axis=[1]))
        return ops.mean((norm - 1.0) ** 2)

    def train_step(self, data):
        """Trains the discriminator twice, then the generator."""
        real_images, noise = _halves(data)
        for _ in range(2):
            with tf.GradientTape() as tape:
                fake_images = self.generator(noise)
                fake, real = self.discriminator(fake_images), self.discriminator(real_images)
                d_cost = ops.mean(fake) - ops.mean(real)
                d_loss = d_cost + 10.0 * self.gradient_penalty(real_images, fake_images)
            grads = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(
                zip(grads, self.discriminator.trainable_variables, strict=True)
            )
        with tf.GradientTape() as tape:
            g_loss = -ops.mean(self.discriminator(self.generator(noise)))
        grads = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(
            zip(grads, self.generator.trainable_variables, strict=True)
        )
        return {"d_loss": d_loss, "g_loss": g_loss}


class CycleGAN(keras.Model):
    """Four optimizers, a persistent tape, and a sum of several losses."""

    width = 2 * WIDTH

    def __init__(self):
        super().__init__()
        self.to_y, self.to_x, self.of_x, self.of_y = (_net(u) for u in (WIDTH, WIDTH, 1, 1))

    def compile(self, optimizer):
        """Sets one optimizer per network."""
        super().compile()
        config = optimizer.get_config()
        self.optimizers = [optimizer, *(type(optimizer).from_config(config) for _ in range(3))]
        self.cycle_loss_fn = keras.losses.MeanAbsoluteError()
        self.adv_loss_fn = keras.losses.MeanSquaredError()

    def train_step(self, data):
        """Trains all four networks."""
        real_x, real_y = _halves(data)
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = self.to_y(real_x), self.to_x(real_y)
            cycled = self.cycle_loss_fn(real_x, self.to_x(fake_y))
            cycled += self.cycle_loss_fn(real_y, self.to_y(fake_x))
            losses = []
            for generator, critic, fake, same in (
                (self.to_y, self.of_y, fake_y, real_y),
                (self.to_x, self.of_x, fake_x, real_x),
            ):
                opinion = critic(fake)
                identity = self.cycle_loss_fn(same, generator(same)) * 5.0
                loss = self.adv_loss_fn(ops.ones_like(opinion), opinion) + cycled * 10.0 + identity
                losses.append(loss)
            for critic, real, fake in (
                (self.of_x, real_x, fake_x),
                (self.of_y, real_y, fake_y),
            ):
                seen, made = critic(real), critic(fake)
                loss = self.adv_loss_fn(ops.ones_like(seen), seen)
                losses.append((loss + self.adv_loss_fn(ops.zeros_like(made), made)) * 0.5)
        networks = (self.to_y, self.to_x, self.of_x, self.of_y)
        for loss, network, optimizer in zip(losses, networks, self.optimizers, strict=True):
            grads = tape.gradient(loss, network.trainable_variables)
            optimizer.apply_gradients(zip(grads, network.trainable_variables, strict=True))
        return dict(zip(("G_loss", "F_loss", "D_X_loss", "D_Y_loss"), losses, strict=True))


class Contrastive(keras.Model):
    """SimCLR's loss over pairs of the global batch, gathered from all replicas."""

    width = 2 * WIDTH

    def __init__(self):
        super().__init__()
        self.encoder = _net(4)
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")

    def contrastive_loss(self, one, other):
        """Returns the contrastive loss."""
        replica = tf.distribute.get_replica_context()
        one, other = (replica.all_gather(ops.normalize(z, axis=1), axis=0) for z in (one, other))
        similarities = ops.matmul(one, ops.transpose(other)) / 0.1
        labels = ops.arange(ops.shape(one)[0])
        values = [
            keras.losses.sparse_categorical_crossentropy(labels, s, from_logits=True)
            for s in (similarities, ops.transpose(similarities))
        ]
        return ops.mean(values[0] + values[1]) / 2

    def train_step(self, data):
        """Pulls both views of a row together."""
        one, other = _halves(data)
        with tf.GradientTape() as tape:
            loss = self.contrastive_loss(self.encoder(one), self.encoder(other))
        gradients = tape.gradient(loss, self.encoder.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.encoder.trainable_weights, strict=True))
        self.contrastive_loss_tracker.update_state(loss)
        return {"c_loss": self.contrastive_loss_tracker.result()}


class Distiller(keras.Model):
    """A custom `compute_loss` with Keras's `train_step`."""

    labels = True

    def __init__(self):
        super().__init__()
        self.teacher, self.student = _net(3), _net(3)
        self.distillation = keras.losses.KLDivergence()

    def call(self, x):
        """Returns the student's logits."""
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """Weights the loss on the labels and the teacher's loss."""
        self.teacher.trainable = False
        crossentropy = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        soft = [ops.softmax(z / 10.0, axis=1) for z in (self.teacher(x), y_pred)]
        return 0.1 * ops.mean(crossentropy) + 0.9 * self.distillation(*soft) * 10.0**2


class Diffusion(keras.Model):
    """Noise at a random time per row; a second network follows the first by a moving average."""

    width = 2 * WIDTH

    def __init__(self):
        super().__init__()
        self.network, self.ema_network = _net(WIDTH), _net(WIDTH)
        self.ema_network.set_weights(self.network.get_weights())
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")

    @property
    def metrics(self):
        """Returns the tracker."""
        return [self.noise_loss_tracker]

    def train_step(self, data):
        """Predicts the noise."""
        images, noises = _halves(data)
        rate = ops.sigmoid(images[:, :1])
        noisy = rate * images + (1.0 - rate) * noises
        with tf.GradientTape() as tape:
            noise_loss = self.compiled_loss_of(noises, self.network(noisy))
        gradients = tape.gradient(noise_loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        self.noise_loss_tracker.update_state(noise_loss)
        for weight, ema_weight in zip(self.network.weights, self.ema_network.weights, strict=True):
            ema_weight.assign(0.9 * ema_weight + 0.1 * weight)
        return {m.name: m.result() for m in self.metrics}

    def compiled_loss_of(self, truth, found):
        """Returns the mean absolute error."""
        return ops.mean(keras.losses.mean_absolute_error(truth, found))


class Siamese(keras.Model):
    """A loss per row, whose gradient sums over rows; a tracker of it."""

    width = 3 * WIDTH

    def __init__(self):
        super().__init__()
        self.embedding = _net(4)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        """Returns the tracker."""
        return [self.loss_tracker]

    def train_step(self, data):
        """Pulls anchor and positive together."""
        with tf.GradientTape() as tape:
            anchor, positive, negative = map(self.embedding, ops.split(data, 3, axis=-1))
            loss = ops.sum(ops.square(anchor - positive), -1)
            loss = ops.maximum(loss - ops.sum(ops.square(anchor - negative), -1) + 0.5, 0.0)
        gradients = tape.gradient(loss, self.embedding.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.embedding.trainable_weights, strict=True)
        )
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


class MaskedLanguageModel(keras.Model):
    """Weighted losses per token, `reduction=None`."""

    tokens = True

    def __init__(self):
        super().__init__()
        self.embedding, self.head = layers.Embedding(9, 4), layers.Dense(9)
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(True, reduction=None)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        """Returns logits for each token."""
        return self.head(self.embedding(x))

    @property
    def metrics(self):
        """Returns the tracker."""
        return [self.loss_tracker]

    def train_step(self, inputs):
        """Predicts tokens."""
        features, labels, sample_weight = inputs
        with tf.GradientTape() as tape:
            predictions = self(features, training=True)
            loss = self.loss_fn(labels, predictions, sample_weight=sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss, sample_weight=sample_weight)
        return {"loss": self.loss_tracker.result()}


class Guide(_Classifier):
    """The guide "Customizing what happens in fit": `train_step`, `test_step`, own metrics."""

    def __init__(self):
        super().__init__()
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @property
    def metrics(self):
        """Returns both metrics."""
        return [self.loss_tracker, self.accuracy]

    def train_step(self, data):
        """Uses sample weights if given."""
        x, y = data[:2]
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred, data[2] if len(data) == 3 else None)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            metric.update_state(*((loss,) if metric.name == "loss" else (y, y_pred)))
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        """Tracks the loss."""
        x, y = data[:2]
        y_pred = self(x, training=False)
        self.loss_tracker.update_state(self.loss_fn(y, y_pred))
        self.accuracy.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class AddedLosses(_Classifier):
    """Layers that add losses: a scalar, and one per row, as a CTC layer does; own means."""

    def __init__(self):
        super().__init__()
        self.total = keras.metrics.Mean(name="total")

    def call(self, x):
        """Returns logits, and adds losses."""
        logits = self.network(x)
        self.add_loss(0.1 * ops.mean(ops.square(logits)))
        self.add_loss(0.01 * ops.sum(ops.square(logits), -1, keepdims=True))
        return logits

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """Tracks the loss."""
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        self.total.update_state(loss)
        return loss


class DerivedLogs(_Classifier):
    """Logs computed from metrics in `compute_metrics`; a hidden metric."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.metrics.Mean(name="hidden")

    @property
    def metrics(self):
        """Returns all metrics except the hidden one."""
        return [metric for metric in super().metrics if metric is not self.hidden]

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        """Adds a decibel value."""
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        self.hidden.update_state(ops.max(y_pred, -1))
        results["hidden"] = self.hidden.result()
        results["decibel"] = -10.0 * ops.log(results["accuracy"] + results["hidden"] ** 2 + 1.0)
        return results


class MetaLearner(keras.Model):
    """A gradient of weights inside a tape: one step of an inner learner."""

    labels = True

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(3, use_bias=False)
        self.head.build((None, WIDTH))

    def call(self, x):
        """Returns logits."""
        return self.head(x)

    def train_step(self, data):
        """Trains the weights from which the inner learner takes its step."""
        x, y = data
        kernel = self.head.kernel
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner_tape:
                inner_loss = ops.sum(kernel**4)
            fast = kernel - 0.1 * inner_tape.gradient(inner_loss, kernel)
            crossentropy = keras.losses.sparse_categorical_crossentropy(
                y, ops.matmul(x, fast), from_logits=True
            )
            loss = ops.mean(crossentropy)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


class Private(_Classifier):
    """DP-SGD: each row's gradient is clipped, and their sum divided by the full batch size."""

    def train_step(self, data):
        """Clips the gradient of each row."""
        x, y = data
        with tf.GradientTape() as tape:
            crossentropy = keras.losses.sparse_categorical_crossentropy(
                y, self(x), from_logits=True
            )
        rows = tape.jacobian(crossentropy, self.trainable_variables, experimental_use_pfor=False)
        squares = [ops.sum(ops.square(r), tuple(range(1, len(r.shape)))) for r in rows]
        scale = 1.0 / ops.maximum(1.0, ops.sqrt(sum(squares)))
        grads = [ops.tensordot(scale, r, [[0], [0]]) / 8.0 for r in rows]
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": ops.mean(crossentropy)}


class TensorFlowMeans(_Classifier):
    """TensorFlow's own helpers, used as in its tutorials on loops."""

    def train_step(self, data):
        """Sums two means and a regulariser."""
        x, y = data
        with tf.GradientTape() as tape:
            crossentropy = keras.losses.sparse_categorical_crossentropy(
                y, self(x), from_logits=True
            )
            loss = tf.nn.compute_average_loss(crossentropy, sample_weight=x[:, 0] ** 2)
            loss += tf.nn.compute_average_loss(crossentropy, global_batch_size=8)
            penalty = sum(ops.sum(ops.square(w)) for w in self.trainable_variables)
            loss += tf.nn.scale_regularization_loss(0.1 * penalty)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables))
        return {"loss": loss}


EXAMPLES = {
    "vae": VAE,
    "dcgan": DCGAN,
    "wgan_gp": WGAN,
    "cyclegan": CycleGAN,
    "simclr": Contrastive,
    "distillation": Distiller,
    "ddpm": Diffusion,
    "siamese": Siamese,
    "masked_language": MaskedLanguageModel,
    "guide": Guide,
    "added_losses": AddedLosses,
    "derived_logs": DerivedLogs,
    "meta_learner": MetaLearner,
    "private": Private,
    "tensorflow_means": TensorFlowMeans,
}


def data_of(example: type, rows: int) -> tuple[np.ndarray, ...]:
    """Returns an example's data, the same on every rank."""
    rng = np.random.default_rng(3)
    if hasattr(example, "tokens"):
        x = rng.integers(0, 9, (rows, 4))
        return x, x, (rng.random((rows, 4)) > 0.4).astype("float64")
    x = rng.normal(size=(rows, getattr(example, "width", WIDTH)))
    return (x, rng.integers(0, 3, rows)) if hasattr(example, "labels") else (x,)
