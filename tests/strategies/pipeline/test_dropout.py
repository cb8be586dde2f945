"""Random numbers of stages: the same for one seed, others in each microbatch and step."""

import numpy as np

from tests.strategies.pipeline import dropout_cases as cases


def test_masks_depend_on_the_seed_and_differ_between_microbatches(ranks):
    pool = ranks(4, "mirrored")
    (first,) = pool.run(cases.masks, 3)
    (again,) = pool.run(cases.masks, 3)
    (other,) = pool.run(cases.masks, 4)
    assert len(first) == cases.STEPS * cases.MICROBATCHES
    for stage in range(2):
        of_stage = [mask[stage] for mask in first]
        assert len({mask.tobytes() for mask in of_stage}) == len(of_stage)
        for mask in of_stage:
            assert set(np.unique(mask)) == {0.0, 2.0}
    assert not np.array_equal(first[0][0], first[0][1])
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
