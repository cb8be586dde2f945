"""Builds Horovod against a current TensorFlow: one cached wheel for each combination."""

from tfdml.horovod_build.build import Built, build, plan
from tfdml.horovod_build.errors import BuildError
from tfdml.horovod_build.install import install
from tfdml.horovod_build.options import BuildOptions

__all__ = ["BuildError", "BuildOptions", "Built", "build", "install", "plan"]
