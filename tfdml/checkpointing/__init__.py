"""Checkpoints on disk: written whole or not at all, checked when read. Needs no TensorFlow."""

from tfdml.checkpointing.commit import save
from tfdml.checkpointing.directory import (
    Checkpoint,
    CheckpointDirectory,
    DirectoryInUse,
    NoWholeCheckpoint,
)
from tfdml.checkpointing.files import Files
from tfdml.checkpointing.manifest import DamagedCheckpoint, Manifest, verify
from tfdml.checkpointing.writer import HostCopy, Writer

__all__ = [
    "Checkpoint",
    "CheckpointDirectory",
    "DamagedCheckpoint",
    "DirectoryInUse",
    "Files",
    "HostCopy",
    "Manifest",
    "NoWholeCheckpoint",
    "Writer",
    "save",
    "verify",
]
