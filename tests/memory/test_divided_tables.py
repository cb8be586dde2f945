"""Checks estimates of embedding tables that are divided among the ranks."""

import keras
import pytest

import tfdml
from tests.memory import cases
from tests.memory.networks import SCALARS, recommender
from tfdml.memory import Choice

ROWS, WIDTH, IDS, BATCH = 101, 16, 7, 32
# Of two ranks, rank 0 has the rows 0, 2, ..., 100.
OWN_ROWS = 51
DENSE = 4 * (WIDTH + 1)
# Of the dense layer, a matrix of 16 rows of one number, and a bias.
DENSE_ACCUMULATORS = 4 * (16 + 1)
# Ids that a rank looks up, and the rows of numbers and indices that are their gradient.
LOOKED_UP = BATCH // 2 * IDS


def estimated(model: keras.Model, row_codec: str | None = None, least: int = 0) -> list[Choice]:
    """Returns the choices of two ranks without checkpointing."""
    sharding = tfdml.Sharding(embeddings=True, min_embedding_bytes=least, row_codec=row_codec)
    strategy = tfdml.HorovodStrategy(["CPU:0"], sharding=sharding)
    choices = tfdml.estimate_memory(model, BATCH, strategy, ranks=[2]).choices
    return [c for c in choices if not c.checkpointing]


@pytest.mark.parametrize(
    ("make", "whole_slots", "own_slots", "dense_slots"),
    [
        (
            lambda: tfdml.optimizers.RowWiseAdagrad(0.1),
            4 * ROWS,
            4 * OWN_ROWS,
            DENSE_ACCUMULATORS + SCALARS,
        ),
        (
            lambda: tfdml.optimizers.LazyAdam(0.1),
            8 * ROWS * WIDTH,
            8 * OWN_ROWS * WIDTH,
            2 * DENSE + SCALARS,
        ),
    ],
    ids=["RowWiseAdagrad", "LazyAdam"],
)
def test_parts_of_a_divided_table(make, whole_slots, own_slots, dense_slots):
    plain, sharded, divided, both = estimated(recommender(make()))
    assert [c.name for c in (plain, sharded, divided, both)] == [
        "2 ranks",
        "2 ranks with sharding",
        "2 ranks with divided tables",
        "2 ranks with sharding and divided tables",
    ]
    assert (plain.weights, divided.weights) == (
        4 * ROWS * WIDTH + DENSE,
        4 * OWN_ROWS * WIDTH + DENSE,
    )
    assert (plain.slots, divided.slots) == (whole_slots + dense_slots, own_slots + dense_slots)
    assert both.slots == own_slots + dense_slots // 2
    assert divided.gradients == plain.gradients == LOOKED_UP * (4 * WIDTH + 4) + DENSE


@pytest.mark.parametrize(
    ("row_codec", "encoded", "copies"), [(None, 4 * WIDTH, 2), ("int8", WIDTH + 4, 4)]
)
def test_rows_on_their_way(row_codec, encoded, copies):
    """The sums by row, encoded rows, and their packed copies; the dense sums and their bucket."""
    *_, divided, _ = estimated(recommender(), row_codec)
    assert divided.exchange == LOOKED_UP * (4 * WIDTH + copies * encoded) + 2 * DENSE


def test_a_large_table_fits_only_divided():
    """Adam's update computes with whole slots, of which each rank has its part."""
    model = recommender("adam", rows=100_000)
    plain, sharded, divided, both = estimated(model)
    # Weights, both slots, and two temporaries of the update are halved.
    table = 4 * 100_000 * WIDTH
    assert plain.peak - divided.peak == pytest.approx(5 * table // 2, rel=0.01)
    report = tfdml.estimate_memory(
        model,
        BATCH,
        tfdml.HorovodStrategy(["CPU:0"], sharding=tfdml.Sharding(min_embedding_bytes=table)),
        ranks=[1, 2],
    )
    assert report.fits(sharded.peak - 1).name == "2 ranks with divided tables"
    assert "divided tables" in str(report).splitlines()[2]
    assert any(line.split()[:4] == ["2", "-", "yes", "-"] for line in str(report).splitlines())


def test_small_tables_stay_whole():
    plain, sharded = estimated(recommender(), least=4 * ROWS * WIDTH + 1)
    assert not plain.divided_tables
    report = tfdml.estimate_memory(recommender(), BATCH, ranks=[2])
    assert "divided" not in str(report)


def test_a_table_that_is_not_trained():
    model = recommender()
    model.layers[0].trainable = False
    model.compile("adam", "mse")
    plain, _, divided, _ = estimated(model)
    assert plain.weights - divided.weights == 4 * (ROWS - OWN_ROWS) * WIDTH
    assert plain.slots == divided.slots == 2 * DENSE + SCALARS


class Tied(keras.Model):
    """Model whose output layer has the table's weights."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(ROWS, WIDTH)

    def build(self, input_shape):
        self.table.build()

    def call(self, ids):
        return keras.ops.matmul(self.table(ids), keras.ops.transpose(self.table.embeddings))


def _tied() -> keras.Model:
    model = Tied()
    model.build((None, IDS))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: recommender("adafactor"), "Received: Adafactor, which may need whole tables"),
        (lambda: recommender(embeddings_regularizer="l2"), "`embeddings_regularizer`"),
        (_tied, "reads a table as a whole"),
    ],
    ids=["optimizer", "regularizer", "tied"],
)
def test_tables_that_cannot_be_divided_are_named(make, reason):
    model = make()
    sharding = tfdml.Sharding(min_embedding_bytes=0)
    strategy = tfdml.HorovodStrategy(["CPU:0"], sharding=sharding)
    targets = (BATCH, IDS) if isinstance(model, Tied) else (BATCH, 1)
    data = (keras.ops.zeros((BATCH, IDS), "int32"), keras.ops.zeros(targets))
    report = tfdml.estimate_memory(model, BATCH, strategy, data=data, ranks=[2])
    assert not any(c.divided_tables for c in report.choices)
    assert any(reason in note for note in report.notes)


@pytest.mark.parametrize(
    ("optimizer", "sharding"),
    [
        ("row_wise_adagrad", False),
        pytest.param("lazy_adam", False, marks=pytest.mark.slow),
        pytest.param("row_wise_adagrad", True, marks=pytest.mark.slow),
    ],
)
def test_weights_and_slots_are_those_of_a_real_rank(ranks, optimizer, sharding):
    (found, real), _ = ranks(2).run(cases.estimated_and_real_tables, optimizer, sharding)
    for estimate in found:
        assert estimate["weights"] == real["weights"]
        # Of `sharding`, small variables stay whole.
        assert estimate["slots"] == pytest.approx(real["slots"], abs=64 if sharding else 0)
        assert estimate["whole"] == 4 * ROWS * WIDTH + DENSE
