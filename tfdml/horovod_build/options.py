"""Build options of Horovod: the command's flags as variables that Horovod's build reads."""

import dataclasses
from collections.abc import Mapping

from tfdml.horovod_build.errors import BuildError

# The user's variables for library paths and compilation, which are passed to Horovod's build. Every
# other HOROVOD_ variable is withheld, so that the same flags always mean the same wheel.
PASSED_THROUGH = (
    "HOROVOD_BUILD_CUDA_CC_LIST",
    "HOROVOD_CUDA_HOME",
    "HOROVOD_GPU",
    "HOROVOD_MPICXX_SHOW",
    "HOROVOD_NCCL_HOME",
    "HOROVOD_NCCL_INCLUDE",
    "HOROVOD_NCCL_LIB",
    "HOROVOD_NCCL_LINK",
)
# These also change the compiler's output.
_COMPILER = ("CXX", "CXXFLAGS", "LDFLAGS")


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """Transports that a Horovod wheel is built with.

    Attributes:
        gloo: Gloo over TCP, which is part of Horovod's source. The tested one.
        mpi: An installed MPI with its compiler wrapper. Untested.
        nccl: NCCL for collectives on GPUs, with CUDA's compiler. Not run on several GPUs.

    Raises:
        BuildError: If neither gloo nor MPI is chosen: Horovod needs one for control messages.
    """

    gloo: bool = True
    mpi: bool = False
    nccl: bool = False

    def __post_init__(self) -> None:
        if not (self.gloo or self.mpi):
            raise BuildError(
                "Horovod must be built with gloo or MPI, because one of them carries its control "
                "messages even where NCCL moves the data.",
                received=f"gloo={self.gloo}, mpi={self.mpi}, nccl={self.nccl}",
                fix="Leave out `--no-gloo`, or add `--mpi`.",
            )

    @property
    def label(self) -> str:
        """Names of the chosen transports, such as `gloo+nccl`."""
        return "+".join(f.name for f in dataclasses.fields(self) if getattr(self, f.name))

    def variables(self) -> dict[str, str]:
        """Returns the variables that select what Horovod's build includes."""
        chosen = {
            "HOROVOD_WITH_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_PYTORCH": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITH_GLOO" if self.gloo else "HOROVOD_WITHOUT_GLOO": "1",
            "HOROVOD_WITH_MPI" if self.mpi else "HOROVOD_WITHOUT_MPI": "1",
        }
        if self.nccl:
            chosen["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        return chosen

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Returns the complete environment of a build.

        Args:
            inherited: Environment variables of the command.

        Returns:
            `inherited` without stray HOROVOD_ variables, plus those of the options.
        """
        filtered = {
            name: value
            for name, value in inherited.items()
            if not name.startswith("HOROVOD_") or name in PASSED_THROUGH
        }
        return {**filtered, **self.variables()}

    def fingerprint(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Returns every variable that changes the wheel, for the key of the cache.

        Args:
            inherited: Environment variables of the command.
        """
        relevant = (*PASSED_THROUGH, *_COMPILER)
        passed = {name: inherited[name] for name in relevant if name in inherited}
        return {**self.variables(), **passed}
