"""Checks the layer that `remat` makes of a layer or a model: building, masks, dtypes, files."""

import keras
import numpy as np
import pytest
from keras import layers

import tfdml
from tests.strategies.remat.cases import MODELS, data


class Own(keras.Model):
    """A model whose blocks are built by its first batch."""

    def __init__(self, make=tfdml.remat):
        super().__init__()
        self.blocks = [
            make(keras.Sequential([layers.Dense(4, "tanh"), layers.Dropout(0.2, seed=i)]))
            for i in range(2)
        ]
        self.last = layers.Dense(1)

    def call(self, inputs):
        """Returns one number a row."""
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return self.last(inputs)


def _fitted(model: keras.Model, rows: np.ndarray, targets: np.ndarray) -> list[np.ndarray]:
    model.compile("adam", "mse", jit_compile=False)
    model.fit(rows, targets, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def test_a_subclassed_model_is_built_by_its_first_batch():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 4)), rng.normal(size=(16, 1))
    weights = []
    for make in (lambda layer: layer, tfdml.remat):
        keras.utils.set_random_seed(1)
        weights.append(_fitted(Own(make), x, y))
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "sequence"])
def test_a_model_with_blocks_is_saved_and_loaded(tmp_path, name):
    x, y = data(name)
    model = MODELS[name]("block", dropout=False)
    _fitted(model, x, y)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    blocks = [layer for layer in loaded.layers if type(layer).__name__ == "Remat"]
    assert [b.name for b in blocks] == [
        layer.name for layer in model.layers if type(layer).__name__ == "Remat"
    ]
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    for one, other in zip(_fitted(model, x, y), _fitted(loaded, x, y), strict=True):
        np.testing.assert_array_equal(one, other)
    model.save_weights(tmp_path / "own.weights.h5")
    loaded.load_weights(tmp_path / "own.weights.h5")


def test_weights_move_between_models_with_and_without_blocks():
    plain, ours = (MODELS["dense"](how) for how in ("none", "block"))
    ours.set_weights(plain.get_weights())
    x, _ = data("dense")
    np.testing.assert_array_equal(plain.predict(x, verbose=0), ours.predict(x, verbose=0))
    assert [len(m.trainable_variables) for m in (plain, ours)] == [14, 14]


def test_masks_go_through_a_block():
    inputs = layers.Input((3,), dtype="int32")
    hidden = tfdml.remat(layers.Embedding(5, 4, mask_zero=True))(inputs)
    hidden = tfdml.remat(layers.Dense(4))(hidden)
    model = keras.Model(inputs, layers.GlobalAveragePooling1D()(hidden))
    rows = np.array([[1, 2, 0], [1, 0, 0]])
    _fitted(model, rows, np.ones((2, 4)))
    table, kernel, bias = model.get_weights()
    expected = [(table[[1, 2]] @ kernel + bias).mean(0), table[1] @ kernel + bias]
    np.testing.assert_allclose(model.predict(rows, verbose=0), expected, rtol=1e-5)


def test_a_cell_with_masks_of_its_own():
    """Its layer draws them before the first step, and drops them after the last one."""
    x, weights = np.random.default_rng(0).normal(size=(8, 5, 4)), []
    for names in ([], ["lstm_cell"]):
        keras.utils.set_random_seed(1)
        with keras.RematScope("list_of_layers", layer_names=names):
            lstm = layers.LSTM(
                3, dropout=0.3, recurrent_dropout=0.3, unroll=True, seed=1, dtype="float64"
            )
        weights.append(_fitted(keras.Sequential([lstm]), x, np.ones((8, 3))))
    for one, other in zip(*weights, strict=True):
        # Gradients of the steps are added in another order.
        np.testing.assert_allclose(one, other, rtol=1e-13)


class Pooled(keras.Model):
    """Embeds and pools by functions, whose tensors have masks."""

    def __init__(self, remat):
        super().__init__()
        self.table = layers.Embedding(5, 4, mask_zero=True)
        self.pool = layers.GlobalAveragePooling1D()
        self.embed = remat(lambda ids: self.table(ids))
        self.average = remat(lambda rows: self.pool(rows))

    def call(self, inputs):
        """Returns squared means of the rows that count."""
        return self.average(self.embed(inputs)) ** 2


def test_masks_go_through_a_function():
    """Out of it, and into it in both passes."""
    rows, weights = np.array([[1, 2, 0], [1, 0, 0]]), []
    for remat in (lambda function: function, tfdml.remat):
        keras.utils.set_random_seed(1)
        weights.append(_fitted(Pooled(remat), rows, np.ones((2, 4))))
    np.testing.assert_array_equal(*(w[0] for w in weights))


def test_tensors_and_others_as_keywords():
    """Keras refuses both in one argument, which `**kwargs` of a wrapper would be."""
    attention = layers.MultiHeadAttention(2, 3, dtype="float64")
    x, mask = np.random.default_rng(0).normal(size=(2, 5, 4)), np.tri(5, dtype=bool)[None]
    ours = tfdml.remat(attention)
    given = {"value": x, "attention_mask": mask, "return_attention_scores": True}
    one, other = ours(query=x, **given), attention(x, **given)
    np.testing.assert_array_equal(one[1], other[1])


def test_the_layers_own_dtype_and_name_are_kept():
    block = tfdml.remat(layers.Dense(2, dtype="float64", name="half"))
    assert (block.name, block.dtype_policy.name) == ("half", "float64")
    outputs = block(np.full((1, 2), 1.0 + 1e-12))
    assert outputs.dtype == "float64"
    kernel, _ = block.get_weights()
    # In float32 the inputs would be 1, and the outputs differ by 1e-12.
    np.testing.assert_allclose(outputs[0], np.full(2, 1.0 + 1e-12) @ kernel, rtol=2e-13)


def test_a_frozen_layer_stays_frozen():
    dense = layers.Dense(2)
    dense.trainable = False
    block = tfdml.remat(dense)
    block(np.ones((1, 3)))
    assert (len(block.trainable_variables), len(block.variables)) == (0, 2)


def test_a_block_of_a_block_is_the_same():
    block = tfdml.remat(layers.Dense(2))
    assert tfdml.remat(block) is block
