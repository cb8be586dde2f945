"""The exchange starts while the backward pass runs: read from Horovod's own timeline."""

import numpy as np

from tools.overlap import median_step, record


def test_the_first_bucket_is_exchanged_before_the_last_is_ready(tmp_path):
    steps = record(tmp_path / "timeline.json")
    step = median_step(steps)
    assert len(steps) == 12
    assert len(step) >= 5
    # An order, not a duration: were all gradients awaited first, it could hold in no step.
    assert any(s[0].begin < s[-1].ready for s in steps)
    # The buckets are filled, and so exchanged, from the last layer to the first. On a busy machine
    # two buckets of one step may change places: hence a correlation (1: in order, 0: in none).
    orders = [[e.bucket for e in sorted(s, key=lambda e: e.ready)] for s in steps]
    in_order = np.mean([np.corrcoef(order, range(len(step)))[0, 1] for order in orders])
    assert in_order > 0.7
