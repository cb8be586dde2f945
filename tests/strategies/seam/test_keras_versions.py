"""Checks behaviour that is equal on all supported versions of Keras, which itself differs."""

import keras
import pytest

from tfdml.strategies.keras_seam.keras_versions import distinct_name


class Named(keras.optimizers.SGD):
    """An optimizer with a default name, as all have in Keras 3.14."""

    def __init__(self, learning_rate=0.1, name="Named", **kwargs):
        super().__init__(learning_rate, name=name, **kwargs)


@pytest.fixture(autouse=True)
def _no_names_yet():
    keras.utils.clear_session()


def test_two_optimizers_have_the_names_of_the_newest_keras():
    one, other = keras.optimizers.SGD(), keras.optimizers.SGD()
    names = [distinct_name(optimizer) for optimizer in (one, other, one)]
    assert names == ["sgd", "sgd_1", "sgd"]


def test_a_default_name_is_made_distinct_on_each_keras():
    one, other = Named(), Named()
    assert one.name == other.name
    assert [distinct_name(optimizer) for optimizer in (one, other, one)] == [
        "named",
        "named_1",
        "named",
    ]


def test_user_given_name_is_kept():
    assert distinct_name(Named(name="mine")) == "mine"
    assert distinct_name(keras.optimizers.Adam(name="mine")) == "mine"
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    assert distinct_name(scaled) == scaled.name
