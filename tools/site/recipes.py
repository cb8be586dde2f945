"""The recipes of the gallery: how each is run at build, on data that needs no download."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.harness import side_environment


class Recipe(NamedTuple):
    """A recipe of the gallery.

    Attributes:
        name: The file in `recipes/`, without `.py`.
        title: Its heading.
        commands: The shell commands that are run, in turn, in a folder with `recipes/` in it.
        note: Differences from the recipe's own settings, for readers.
        python: Returns the Python of another environment, which it makes if it is missing.
    """

    name: str
    title: str
    commands: tuple[str, ...]
    note: str = ""
    python: Callable[[], Path] | None = None


# What helps recipes, or needs more than the site's environment has, and is shown as source alone.
HELPERS = {"images": "Images for the recipes", "spark": "A job on a Spark cluster"}

_DIGITS = "Run on the 1,797 digits that come with scikit-learn."

RECIPES = (
    Recipe(
        "fashion_mnist",
        "Images with a small CNN",
        ("tfdml launch --workers 2 recipes/fashion_mnist.py --data digits --epochs 8",),
        _DIGITS,
    ),
    Recipe(
        "make_records",
        "Images as TFRecords",
        (
            "python recipes/make_records.py digits --data digits --shards 2",
            "tfdml records verify digits",
            "tfdml launch --workers 2 recipes/fashion_mnist.py --records digits --epochs 2",
        ),
        _DIGITS,
    ),
    Recipe(
        "table",
        "A table, with classes balanced",
        (
            "python recipes/table.py make table",
            "tfdml records convert table/cancer.parquet -o table/records "
            "--split train=0.8,test=0.2",
            "horovodrun -np 2 python recipes/table.py train table/records --epochs 10",
        ),
    ),
    Recipe(
        "text",
        "Text of any length",
        (
            "python recipes/text.py make lines.jsonl --limit 400",
            "tfdml records convert lines.jsonl -o text --split train=0.9,test=0.1 --shuffle 1",
            "horovodrun -np 2 python recipes/text.py train text --epochs 4",
        ),
        "Run on the first 400 lines of each module.",
    ),
    Recipe(
        "detection",
        "Detection: several outputs",
        ("tfdml launch --workers 2 recipes/detection.py --data digits --pictures 4000",),
        _DIGITS,
    ),
    Recipe(
        "time_series",
        "Time series from Parquet",
        (
            "python recipes/time_series.py make weather",
            "tfdml launch --workers 2 recipes/time_series.py train weather --epochs 6",
        ),
    ),
    Recipe(
        "compressed",
        "Compressed gradients",
        (
            "tfdml launch --workers 2 recipes/compressed.py --compression powersgd --data digits "
            "--epochs 6 --batch-size 64",
        ),
        _DIGITS + " On a link as fast as this machine's memory no codec saves time.",
    ),
    Recipe(
        "local_updates",
        "Several sites over a slow link",
        (
            "horovodrun -np 2 python recipes/local_updates.py --data digits --epochs 6 "
            "--batch-size 32",
        ),
        _DIGITS,
    ),
    Recipe(
        "robust",
        "One rank has wrong data",
        (
            "horovodrun -np 4 python recipes/robust.py --data digits --epochs 8 --batch-size 32",
            "horovodrun -np 4 python recipes/robust.py --rule mean --data digits --epochs 8 "
            "--batch-size 32",
        ),
        _DIGITS,
    ),
    Recipe(
        "federated",
        "Federated learning with Flower",
        ("python recipes/federated.py --data digits --clients 3 --rounds 6",),
        _DIGITS,
        side_environment.flower_python,
    ),
    Recipe(
        "large_batch",
        "Large batches",
        (
            "horovodrun -np 2 python recipes/large_batch.py --optimizer lars --batch-size 500 "
            "--learning-rate 0.2 --data digits --epochs 12",
        ),
        _DIGITS,
    ),
    Recipe(
        "optuna_search",
        "A search with Optuna",
        ("tfdml launch --workers 2 recipes/optuna_search.py --data digits --trials 8",),
        _DIGITS,
    ),
    Recipe(
        "pipeline",
        "A transformer in stages on several devices",
        (
            "python recipes/pipeline.py --stages 2 --blocks 2 --width 32 --microbatches 4 "
            "--memory 12 --characters 20000 --epochs 1",
        ),
        "Run with a small transformer on 20,000 characters.",
    ),
    Recipe(
        "transformer",
        "A transformer with LAMB and float16",
        (
            "horovodrun -np 2 python recipes/transformer.py --policy mixed_float16 "
            "--characters 20000 --batch-size 32 --epochs 4",
        ),
        "Run on 20,000 characters.",
    ),
    Recipe(
        "lora",
        "A KerasHub model, fine-tuned with LoRA",
        (
            "tfdml launch --workers 2 recipes/lora.py --compression int8 --characters 100000 "
            "--epochs 3",
        ),
        "Run on 100,000 characters of each text.",
        side_environment.hub_python,
    ),
    Recipe(
        "resume",
        "Resume after a kill",
        (
            "python recipes/resume.py --show --epochs 3",
            "tfdml launch --horovod --workers 2 --max-restarts 3 recipes/resume.py run1 --epochs 2",
        ),
        "Killed three times on one process, then run on two ranks.",
    ),
    Recipe(
        "elastic",
        "Elastic training",
        (
            "printf '#!/bin/sh\\necho localhost:2\\n' > hosts.sh && chmod +x hosts.sh",
            "horovodrun -np 2 --min-np 1 --max-np 2 --host-discovery-script ./hosts.sh "
            "--network-interface lo --gloo-timeout-seconds 120 python recipes/elastic.py "
            "--epochs 8",
        ),
        "Run on two ranks that both stay.",
    ),
    Recipe(
        "recommender",
        "A recommender on parameter servers",
        ("tfdml launch --workers 2 --ps 2 recipes/recommender.py --epochs 3 --steps 100",),
    ),
    Recipe(
        "own_train_step",
        "A custom `train_step`",
        ("horovodrun -np 2 python recipes/own_train_step.py",),
    ),
    Recipe(
        "gan",
        "A GAN: two networks, two optimizers",
        ("tfdml launch --workers 2 recipes/gan.py --data digits --batch-size 50 --epochs 20",),
        _DIGITS,
    ),
    Recipe(
        "own_loop",
        "A custom loop",
        ("horovodrun -np 2 python recipes/own_loop.py",),
    ),
    Recipe(
        "synchronized_batch_norm",
        "Synchronized `BatchNormalization`",
        ("horovodrun -np 2 python recipes/synchronized_batch_norm.py",),
    ),
)
