"""Files written before parts of the code were renamed: names stored in them are still read."""

import shutil
from pathlib import Path

import keras
import numpy as np

from tests.checkpointing.test_resume import run
from tfdml.data import verify
from tfdml.data.read.ledger import Account

# Written on two ranks after step 6 with OneBit, momentum and gradient accumulation, from records.
OLD = Path(__file__).with_name("written_by_0_1_0")
OPTIONS = {"strategy": True, "compression": "onebit", "optimizer": "accumulating", "width": 200}


def test_an_old_checkpoint_resumes_with_all_its_state(ranks, tmp_path):
    shutil.copytree(OLD, tmp_path / "old")
    records = str(tmp_path / "old" / "records")
    assert verify(records).records == 40
    ledger = str(tmp_path / "ledger")
    whole = run(ranks, 2, str(tmp_path / "whole"), records, ledger=ledger, **OPTIONS)
    assert Account(ledger).problems == []
    resumed = run(ranks, 2, str(tmp_path / "old" / "checkpoint"), records, **OPTIONS)
    for one, other in zip(whole, resumed, strict=True):
        assert other["batches"] == one["batches"]
        # The processor that wrote it may have rounded otherwise. A residual, a sum of gradients
        # or a momentum that was not restored changes weights by more than 1e-3.
        for ours, theirs in zip(one["values"], other["values"], strict=True):
            np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-5)


def test_old_configurations_of_compressors_are_read():
    config = {
        "module": "tfdml.compression.qsgd",
        "class_name": "QSGD",
        "config": {"bits": 4},
        "registered_name": "tfdml>QSGD",
    }
    assert keras.saving.deserialize_keras_object(config).bits == 4
