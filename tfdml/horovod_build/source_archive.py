"""Horovod's source distribution: download, verification, unpacking and patches."""

import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tfdml.horovod_build import child
from tfdml.horovod_build.cache import sha256
from tfdml.horovod_build.changes import ADDED, CHANGES, added_file
from tfdml.horovod_build.errors import BuildError

VERSION = "0.28.1"
ARCHIVE = f"horovod-{VERSION}.tar.gz"
# SHA-256 of the published archive, verified because the compiled code runs with the user's rights.
DIGEST = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
_DOWNLOAD_SECONDS = 600


def fetch(directory: Path, environment: Mapping[str, str], log: Path) -> Path:
    """Returns the verified source archive, downloading it by pip if necessary.

    Args:
        directory: Directory of archives.
        environment: Environment variables of pip, which uses the user's configuration.
        log: File that pip's output is appended to.

    Returns:
        Path of the archive in `directory`.

    Raises:
        BuildError: If the archive cannot be downloaded, or is not the published one.
    """
    archive = directory / ARCHIVE
    if archive.exists() and sha256(archive) == DIGEST:
        return archive
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=directory) as scratch:
        command = [sys.executable, "-m", "pip", "download", f"horovod=={VERSION}"]
        command += ["--no-deps", "--no-binary", "horovod", "--no-build-isolation", "-d", scratch]
        ended = child.run(command, environment=environment, timeout=_DOWNLOAD_SECONDS, log=log)
        downloaded = Path(scratch) / ARCHIVE
        if not ended.ok or not downloaded.exists():
            raise BuildError(
                f"pip must be able to download the source distribution horovod=={VERSION}.",
                received=last_lines(ended.output, 3) or f"exit code {ended.returncode}",
                fix="Check the network and pip's configuration (`pip config list`). Without a "
                f"network, copy {ARCHIVE} into {directory} and run the command again.",
                log=log,
            )
        digest = sha256(downloaded)
        if digest != DIGEST:
            raise BuildError(
                f"{ARCHIVE} must be the published archive, with SHA-256 {DIGEST}.",
                received=digest,
                fix="Check where pip downloads from (`pip config list`).",
                log=log,
            )
        downloaded.replace(archive)
    return archive


def unpack(archive: Path, directory: Path) -> Path:
    """Unpacks the archive, applies `CHANGES` to its files and adds those of `ADDED`.

    Args:
        archive: Verified source archive.
        directory: Directory to unpack into.

    Returns:
        Root of the source tree.

    Raises:
        BuildError: If a text to replace does not occur exactly once in its file.
    """
    with tarfile.open(archive) as opened:
        if hasattr(tarfile, "data_filter"):
            opened.extractall(directory, filter="data")
        else:
            opened.extractall(directory)
    root = directory / f"horovod-{VERSION}"
    for name, changes in CHANGES.items():
        path = root / name
        content = path.read_text(encoding="utf-8")
        for before, after in changes:
            if content.count(before) != 1:
                raise BuildError(
                    f"{name} must contain exactly once: {before.strip()!r}.",
                    received=f"it {content.count(before)} times",
                    fix=f"Remove {archive} and run the command again.",
                )
            content = content.replace(before, after)
        path.write_text(content, encoding="utf-8")
    for name, added in ADDED.items():
        shutil.copyfile(added_file(added), root / name)
    return root


def last_lines(text: str, count: int) -> str:
    """Returns the last `count` non-empty lines of a text, each cut to 300 characters."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(line[:300] for line in lines[-count:])
