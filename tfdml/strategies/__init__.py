"""Where `model.fit` is distributed: `tf.distribute` strategies that Keras 3 works under."""

from tfdml.strategies.horovod import HorovodStrategy

__all__ = ["HorovodStrategy"]
