"""Wrong pipelines are refused with the rule, what was received, and the fix."""

import re

import pytest

import tfdml
from tests.strategies.compare import assert_close
from tests.strategies.pipeline import cases
from tests.strategies.pipeline import refused_cases as refused
from tfdml.strategies import arguments

PIPELINE = tfdml.PipelineParallel()
PAIR = [["GPU:0", "GPU:1"]]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"num_microbatches": 0},
            "`num_microbatches` must be a positive integer. Received: num_microbatches=0. Use",
        ),
        ({"num_microbatches": True}, "`num_microbatches` must be a positive integer. Received"),
        ({"num_microbatches": 2.0}, "`num_microbatches` must be a positive integer. Received"),
        (
            {"schedule": "zb"},
            "`schedule` must be one of '1f1b', 'gpipe'. Received: schedule='zb'. Use",
        ),
        (
            {"stages": ["a", "b"]},
            "`stages` must be a list of lists of layer names, one list for each stage, or None. "
            "Received: stages=['a', 'b']. Use",
        ),
        ({"stages": [["a"], []]}, "`stages` must be a list of lists of layer names"),
        ({"stages": "ab"}, "`stages` must be a list of lists of layer names"),
        ({"stages": []}, "`stages` must be a list of lists of layer names"),
        (
            {"memory_limits": [1e9, -1]},
            "`memory_limits` must be positive numbers of bytes, one for each stage, or None. "
            "Received: memory_limits=[1000000000.0, -1]. Use",
        ),
        ({"memory_limits": 16e9}, "`memory_limits` must be positive numbers of bytes"),
        ({"memory_limits": "16 GB"}, "`memory_limits` must be positive numbers of bytes"),
    ],
)
def test_arguments_of_a_pipeline(given, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        tfdml.PipelineParallel(**given)


@pytest.mark.parametrize(
    ("devices", "pipeline", "words"),
    [
        (
            [["GPU:0", "GPU:1"], ["GPU:1", "GPU:2"]],
            PIPELINE,
            "`devices` must name each device once. Received: devices=[['GPU:0', 'GPU:1'], "
            "['GPU:1', 'GPU:2']], with GPU:1 in two places. Use",
        ),
        ([["GPU:0", "gpu:0"]], PIPELINE, "`devices` must name each device once. Received"),
        ([["GPU:0", "/device:GPU:0"]], PIPELINE, "`devices` must name each device once. Received"),
        (
            [["GPU:0", "GPU:1"], ["GPU:2"]],
            PIPELINE,
            "`devices` must be groups of the same number of devices, because each has the same "
            "stages. Received: devices=[['GPU:0', 'GPU:1'], ['GPU:2']]. Use",
        ),
        ([[], []], PIPELINE, "`devices` must be groups of the same number of devices"),
        (
            PAIR,
            None,
            "`devices` must be a list of names without `pipeline`: lists of names are groups of "
            "devices, each with one replica's stages. Received: devices=[['GPU:0', 'GPU:1']]. Pass",
        ),
        (
            ["GPU:0", "GPU:1"],
            PIPELINE,
            "`devices` must be a list of groups with `pipeline`, each a list of device names. "
            "Received: devices=['GPU:0', 'GPU:1']. Use",
        ),
        (None, PIPELINE, "`devices` must be a list of groups with `pipeline`"),
        ([["GPU:0"], "GPU:1"], PIPELINE, "`devices` must be a list of groups with `pipeline`"),
        ([["GPU:0", 1]], PIPELINE, "`devices` must be a list of groups with `pipeline`"),
        (
            PAIR,
            8,
            "`pipeline` must be a `tfdml.PipelineParallel`, or None. Received: pipeline=8. Use",
        ),
        (
            PAIR,
            tfdml.PipelineParallel(stages=[["a"]]),
            "`stages` must have one list of layers for each device of a group. Received: 1 lists "
            "for groups of 2 devices. Use",
        ),
        (
            PAIR,
            tfdml.PipelineParallel(memory_limits=[1e9]),
            "`memory_limits` must have one number for each device of a group. Received: 1 numbers "
            "for groups of 2 devices. Use",
        ),
    ],
)
def test_devices_and_pipeline_that_do_not_fit(devices, pipeline, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        arguments.check(devices, None, pipeline=pipeline)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (
            "one_layer",
            {},
            ["Every stage needs a call of a layer. Received: num_stages=2 and", "Use at most"],
        ),
        (
            "dense",
            {"batch_size": 5, "groups": cases.TWO_GROUPS},
            [
                "A batch must have a row for each of the 3 microbatches of each of the 2 replicas: "
                "6 rows. Received: batches of 5 rows.",
                "Use larger batches",
            ],
        ),
        (
            "dense",
            {"stages": [["first"], ["lest"]]},
            ["`stages` must name layers of the model. Received: 'lest' in stage 1.", "'last'"],
        ),
        (
            "subclassed",
            {},
            ["A pipeline needs a functional or", "WithoutGraph", "Build"],
        ),
        ("own_train_step", {}, ["custom `train_step`", "OwnTrainStep.train_step", "Override"]),
        (
            "masked",
            {},
            ["must not be a mean over a mask", "Received: a mask", "'words'", "Count first"],
        ),
        (
            "dense",
            {"weighted": True, "reduction": "mean_with_sample_weight"},
            ["or over sample weights", "Received: sample weights", "Count first"],
        ),
        (
            "synchronized",
            {"groups": cases.TWO_GROUPS},
            ["must not exchange anything with other replicas", "layer 'norm'", "Use for example"],
        ),
    ],
)
def test_models_and_data_that_do_not_fit(ranks, model, options, words):
    kind, size = ("mirrored", 4)
    (message,) = ranks(size, kind).run(refused_error, model, options)
    for part in words:
        assert part in message


def refused_error(model, options):
    """Returns the message with which a model is refused."""
    return refused.error(model, **options)


def test_batch_normalization_is_warned_about_once(ranks):
    ((message,),) = ranks(4, "mirrored").run(refused.warned)
    assert "over a microbatch in a pipeline" in message
    assert "'norm'" in message


def test_a_model_with_its_own_loss_and_metrics(ranks):
    ((plain, staged),) = ranks(4, "mirrored").run(refused.both_own_losses)
    assert set(plain["history"]["constant"]) == {2.0}
    assert_close(plain, staged, rtol=1e-10, atol=1e-10)
