"""The table of contents: which pages the site has, in which order."""

# Pages by their caption, as they are named in Sphinx's source folder.
CONTENTS: dict[str, list[str]] = {
    "Start": ["start", "strategies", "parallelism", "guarantees"],
    "Guides": [
        "data",
        "tfrecords",
        "compression",
        "slow_networks",
        "robust",
        "federated",
        "large_batches",
        "recommenders",
        "half_precision",
        "memory",
        "tuning",
        "checkpoints",
        "elastic",
        "parameter_servers",
        "custom_training",
        "debugging",
    ],
    "Run": [
        "launching",
        "slurm",
        "kubernetes",
        "ray",
        "containers",
        "clouds",
        "spark",
        "monitoring",
        "gallery/preemptible",
        "installing_horovod",
        "versions",
    ],
    "Migrate": ["from_horovod", "from_tf_distribute", "from_tf_keras"],
    "Gallery": ["gallery/index"],
    "Benchmarks": ["benchmarks"],
    "Troubleshooting": ["troubleshooting/index", "not_supported"],
    "Reference": ["api/index", "commands/index"],
    "Understand": ["architecture", "gradient_exchange"],
    "Project": ["contributing", "security", "changelog"],
}

# Pages in the repository that are outside of `docs/`, and their names in the source folder.
ELSEWHERE = {
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "recipes/preemptible.md": "gallery/preemptible.md",
    "recipes": "gallery/index.md",
    "tools/benchmarks": "benchmarks.md",
}


def toctree(pages: list[str], caption: str = "", hidden: bool = True) -> str:
    """Returns a table of contents as MyST writes it.

    Args:
        pages: Names of pages, relative to the page with the table.
        caption: Its heading in the sidebar.
        hidden: Whether it is in the sidebar alone.
    """
    options = [":hidden:"] * hidden + [f":caption: {caption}"] * bool(caption)
    return "\n".join(["```{toctree}", ":maxdepth: 1", *options, "", *pages, "```", ""])


def sidebar() -> str:
    """Returns the tables of contents of the whole site."""
    return "\n".join(toctree(pages, caption) for caption, pages in CONTENTS.items())
