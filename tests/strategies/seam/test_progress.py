"""Checks the progress output: one line per epoch by rank 0 without a terminal, and `verbose`."""

import re

import pytest

from tests.strategies.contract import fit_cases

EPOCH = r"Epoch {}/2: [\d.]+ s, [\d.e+]+ ms/step - accuracy: [\d.]+ - loss: [\d.]+"
VALIDATED = EPOCH + r" - val_accuracy: [\d.]+ - val_loss: [\d.]+"


@pytest.mark.parametrize("kind", ["horovod", pytest.param("multi_worker", marks=pytest.mark.slow)])
def test_rank_0_prints_one_line_per_epoch(ranks, kind):
    chief, other = ranks(2, kind).run(fit_cases.printed, None, None)
    lines = chief.splitlines()
    assert len(lines) == 4, chief
    for epoch, line in enumerate(lines[:2], start=1):
        assert re.fullmatch(VALIDATED.format(epoch), line)
    assert re.fullmatch(r"Evaluation: .* ms/step - accuracy: .* - loss: [\d.]+", lines[2])
    assert re.fullmatch(r"Prediction: [\d.]+ s, [\d.e+]+ ms/step", lines[3])
    assert other == ""


def test_lines_within_a_long_epoch(ranks):
    """As if each step took longer than the interval between two lines."""
    chief, _ = ranks(2).run(fit_cases.printed, None, 0.0)
    assert re.search(r"^Epoch 1/2, step 3/4, .* left: .* - accuracy: .*loss", chief, re.M)
    assert re.search(r"^Epoch 2/2, validation step 1: ", chief, re.M)
    # The epoch's own line follows its last step at once.
    assert not re.search(r"step (\d+)/\1,", chief)


@pytest.mark.parametrize(
    ("verbose", "first"),
    [(0, ""), (1, "Epoch 1/2"), pytest.param(2, "Epoch 1/2", marks=pytest.mark.slow)],
)
def test_explicit_verbose_is_respected(ranks, verbose, first):
    chief, other = ranks(2).run(fit_cases.printed, verbose, None)
    assert chief.partition("\n")[0] == first
    assert not re.search(r"Epoch \d/2: ", chief)
    assert other == ""


def test_one_process_shows_the_keras_progress_bar(ranks):
    (output,) = ranks(1).run(fit_cases.printed, None, None)
    assert "Epoch 1/2\n" in output
    assert "━" in output
