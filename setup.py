"""Packaging of tfdml: the one place where supported version ranges are written.

`tfdml doctor` and `tools/bootstrap` read these ranges from the installed metadata, so nothing
else in the repository repeats them.
"""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"

# What building Horovod from source and running `horovodrun` needs. Horovod's launcher imports
# `distutils`, which Python 3.12 and later get from setuptools. cmake 4 refuses Horovod's bundled
# gloo, and Horovod itself asks for 3.13 or later.
HOROVOD = [
    "cloudpickle",
    "cmake>=3.13,<4",
    "packaging",
    "psutil",
    "pyyaml",
    "setuptools",
    "wheel",
]
RECIPES = ["matplotlib", "scikit-learn"]
TEST = ["optax", "pytest>=8", "ruff>=0.12", "tensorboard"]

setup(
    name="tfdml",
    version="0.1.0",
    description="Multi-GPU and multi-node training for Keras 3 on TensorFlow, under plain fit.",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    packages=find_packages(include=["tfdml", "tfdml.*"]),
    python_requires=">=3.10,<3.14",
    install_requires=[
        "filelock>=3.12",
        "keras>=3.15,<3.16",
        "numpy",
        "packaging",
        "platformdirs>=3",
        "psutil",
        "rich>=13",
        "typer>=0.15",
    ],
    extras_require={
        "cpu": ["tensorflow-cpu==2.21.*"],
        "gpu": ["tensorflow[and-cuda]==2.21.*"],
        "horovod": HOROVOD,
        "recipes": RECIPES,
        "test": TEST,
    },
    entry_points={"console_scripts": ["tfdml=tfdml.cli.main:main"]},
)
