"""Checks the recipe with several outputs: its pictures, the overlap of boxes, what it learns."""

import re

import numpy as np
import pytest

from tests.recipes import cases


@pytest.fixture(scope="module")
def recipe():
    return cases.recipe("detection")


def test_boxes_and_masks_are_around_the_items(recipe):
    items = np.zeros((3, 9, 9, 1), "float32")
    items[0, 2:5, 1:8] = items[1, :, 4] = items[2] = 0.5
    classes = np.array([7, 8, 9])
    pictures, y = recipe.compose(items, classes, count=30, seed=0)
    assert pictures.shape == y["mask"].shape == (30, 18, 18, 1)
    sizes = {7: (3, 7), 8: (9, 1), 9: (9, 9)}
    for picture, label, box, mask in zip(pictures, y["label"], y["box"], y["mask"], strict=True):
        top, left, bottom, right = np.rint(box * 18).astype(int)
        assert (bottom - top, right - left) == sizes[label]
        assert mask.sum() == mask[top:bottom, left:right].sum() == np.prod(sizes[label])
        assert (picture[mask == 1] == 0.5).all()
    assert len(np.unique(y["box"], axis=0)) > 20  # In many places.
    assert set(y["label"]) == set(classes)


def test_pictures_follow_from_their_seed(recipe):
    items, classes = np.random.default_rng(0).random((4, 8, 8, 1), "float32"), np.arange(4)
    one, again, other = (recipe.compose(items, classes, 5, seed)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)


def test_overlap(recipe):
    square = [0.0, 0.0, 1.0, 1.0]
    found = np.array([square, [0, 0, 0.5, 1], [0.5, 0.5, 1.5, 1.5], [2, 2, 3, 3], [1, 1, 0, 0]])
    truth = np.array([square] * 5)
    np.testing.assert_allclose(recipe.overlap(truth, found), [1, 0.5, 1 / 7, 0, 0])


@pytest.mark.slow
def test_it_learns_on_two_processes(ranks):
    options = {"data": "digits", "pictures": 4000, "epochs": 6}
    chief, other = ranks(2, "multi_worker").run(cases.run, "detection", options)
    found = re.search(
        r"not seen: label_accuracy (\S+), box_overlap (\S+), mask_overlap (\S+)", chief
    )
    label, box, mask = map(float, found.groups())
    # Guessing a class gives 0.1; the mean box and the mean mask, about 0.2.
    assert label > 0.6
    assert box > 0.5
    assert mask > 0.5
    assert "not seen" not in other
