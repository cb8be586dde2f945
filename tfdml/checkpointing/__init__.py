"""Checkpoints on disk: written whole or not at all, checked when read. Needs no TensorFlow."""

from tfdml.checkpointing.claim import DirectoryInUse
from tfdml.checkpointing.commit import save, staging_directory
from tfdml.checkpointing.directory import Checkpoint, CheckpointDirectory, NoWholeCheckpoint
from tfdml.checkpointing.files import Files
from tfdml.checkpointing.manifest import CheckpointManifest, DamagedCheckpoint, verify
from tfdml.checkpointing.store import StoreFiles, open_files
from tfdml.checkpointing.writer import Writer

__all__ = [
    "Checkpoint",
    "CheckpointDirectory",
    "DamagedCheckpoint",
    "DirectoryInUse",
    "Files",
    "CheckpointManifest",
    "NoWholeCheckpoint",
    "StoreFiles",
    "Writer",
    "open_files",
    "save",
    "staging_directory",
    "verify",
]
