"""Trains one of KerasHub's models, in a small size, on 1, 2 and 3 devices of one process.

    .venv-hub/bin/python -m tests.strategies.architectures.hub_program MODEL RESULT

The result is a pickled dictionary: the outcome by number of devices.
"""

import pickle
import sys
from pathlib import Path

import keras
import keras_hub
import numpy as np
import tensorflow as tf

import tfdml
from tests.strategies.architectures.cases import ADAMW, in_float64, trained
from tests.strategies.architectures.models import (
    BLOCKS,
    CLASSES,
    LENGTH,
    ROWS,
    TOKENS,
    WIDTH,
    Task,
    classification,
    images,
    sentences,
)

DEVICES = (1, 2, 3)
TRANSFORMER = {
    "vocabulary_size": TOKENS,
    "num_layers": BLOCKS,
    "hidden_dim": WIDTH,
    "intermediate_dim": 2 * WIDTH,
    "dropout": 0.0,
}


def _next_tokens(model: keras.Model, rng: np.random.Generator) -> Task:
    """A decoder predicts the next token; padding has weight 0."""
    tokens = sentences(rng, LENGTH + 1)
    x = {"token_ids": tokens[:, :-1], "padding_mask": tokens[:, :-1] != 0}
    return Task(model, x, tokens[:, 1:], classification(), tokens[:, 1:] != 0)


def _translation(model: keras.Model, rng: np.random.Generator) -> Task:
    """An encoder-decoder predicts the next token of the second sentence."""
    source, target = sentences(rng), sentences(rng, LENGTH + 1)
    x = {
        "encoder_token_ids": source,
        "encoder_padding_mask": source != 0,
        "decoder_token_ids": target[:, :-1],
        "decoder_padding_mask": target[:, :-1] != 0,
    }
    return Task(model, x, target[:, 1:], classification(), target[:, 1:] != 0)


def gpt2(rng: np.random.Generator) -> Task:
    """GPT-2: position embeddings, logits by the token embedding."""
    backbone = keras_hub.models.GPT2Backbone(num_heads=2, max_sequence_length=LENGTH, **TRANSFORMER)
    return _next_tokens(keras_hub.models.GPT2CausalLM(backbone), rng)


def llama(rng: np.random.Generator) -> Task:
    """Llama: rotary positions, grouped queries, gated dense layers."""
    backbone = keras_hub.models.LlamaBackbone(
        num_query_heads=4, num_key_value_heads=2, **TRANSFORMER
    )
    return _next_tokens(keras_hub.models.LlamaCausalLM(backbone), rng)


def gemma(rng: np.random.Generator) -> Task:
    """Gemma: like Llama, with one key head, and logits by the token embedding."""
    backbone = keras_hub.models.GemmaBackbone(
        num_query_heads=2, num_key_value_heads=1, head_dim=8, **TRANSFORMER
    )
    return _next_tokens(keras_hub.models.GemmaCausalLM(backbone), rng)


def bert(rng: np.random.Generator) -> Task:
    """BERT, with a classifier on the first token."""
    backbone = keras_hub.models.BertBackbone(num_heads=2, max_sequence_length=LENGTH, **TRANSFORMER)
    model = keras_hub.models.BertTextClassifier(backbone, CLASSES, dropout=0.0)
    tokens = sentences(rng)
    x = {"token_ids": tokens, "padding_mask": tokens != 0, "segment_ids": tokens % 2}
    return Task(model, x, rng.integers(0, CLASSES, ROWS), classification())


def bart(rng: np.random.Generator) -> Task:
    """BART: one embedding for both sides."""
    backbone = keras_hub.models.BartBackbone(num_heads=2, max_sequence_length=LENGTH, **TRANSFORMER)
    return _translation(keras_hub.models.BartSeq2SeqLM(backbone), rng)


def t5(rng: np.random.Generator) -> Task:
    """T5: one embedding of distances for all layers of a side.

    KerasHub's distances are int32 only if Keras's default float is float32: so are losses here.
    """
    keras.backend.set_floatx("float32")
    backbone = keras_hub.models.T5Backbone(num_heads=2, **TRANSFORMER)
    decoded = backbone.output["decoder_sequence_output"]
    logits = backbone.token_embedding(decoded, reverse=True)
    return _translation(keras.Model(backbone.input, logits), rng)


def vit(rng: np.random.Generator) -> Task:
    """A vision transformer with a classifier on its class token."""
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(16, 16, 3),
        patch_size=(4, 4),
        num_layers=BLOCKS,
        num_heads=2,
        hidden_dim=WIDTH,
        mlp_dim=2 * WIDTH,
    )
    model = keras_hub.models.ViTImageClassifier(backbone, CLASSES)
    return Task(model, images(rng, 16), rng.integers(0, CLASSES, ROWS), classification())


def retinanet(rng: np.random.Generator) -> Task:
    """RetinaNet's network: a ResNet, a feature pyramid, boxes and classes at each level.

    The targets are given for anchors. `RetinaNetObjectDetector` would compute them from boxes, and
    divide by the number of anchors hit by a replica's own rows: its loss is not a mean over rows.
    """
    image = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[7],
        stackwise_num_filters=[64, WIDTH, WIDTH, WIDTH],
        stackwise_num_blocks=[1] * 4,
        stackwise_num_strides=[1, 2, 2, 2],
        block_type="basic_block",
        image_shape=(64, 64, 3),
    )
    for layer in image.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True
    backbone = keras_hub.models.RetinaNetBackbone(
        image, min_level=4, max_level=5, use_p5=True, image_shape=(64, 64, 3)
    )
    detector = keras_hub.models.RetinaNetObjectDetector(
        backbone, CLASSES, "xywh", pre_logits_num_conv_layers=1
    )
    # Not the detector itself, which has another loss.
    model = keras.Model(detector.input, detector.output)
    anchors = detector.output["cls_logits"].shape[1]
    y = {
        "bbox_regression": rng.normal(size=(ROWS, anchors, 4)),
        "cls_logits": rng.integers(0, 2, (ROWS, anchors, CLASSES)),
    }
    hit = rng.integers(0, 2, (ROWS, anchors))
    compiled = {
        "loss": {
            "bbox_regression": "huber",
            "cls_logits": keras.losses.BinaryFocalCrossentropy(from_logits=True),
        }
    }
    return Task(model, images(rng, 64), y, compiled, {"bbox_regression": hit, "cls_logits": None})


MODELS = {f.__name__: f for f in (gpt2, llama, gemma, bert, bart, t5, vit, retinanet)}


@in_float64()
def train(model: str, devices: int) -> dict:
    """Trains a model on several devices of this process."""
    keras.backend.clear_session()
    strategy = tfdml.MirroredStrategy(devices=[f"CPU:{i}" for i in range(devices)])
    with strategy.scope():
        keras.utils.set_random_seed(11)
        task = MODELS[model](np.random.default_rng(0))
        task.model.compile(keras.optimizers.AdamW(**ADAMW), **task.compiled)
    return trained(task)


def main(model: str, result: Path) -> None:
    """Writes the outcome for each number of devices."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(max(DEVICES))]
    tf.config.set_logical_device_configuration(cpu, logical)
    result.write_bytes(pickle.dumps({devices: [train(model, devices)] for devices in DEVICES}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
