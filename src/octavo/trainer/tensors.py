"""Nested dictionaries of tensors in a folder, through ``torch.distributed.checkpoint``, and back in place.

PyTorch keeps its metadata as a pickle, and reads values that are no tensors as pickles too. Either could run
code from a folder that somebody else made, so the metadata is read by an unpickler that knows PyTorch's
description of tensors and nothing else, and values that are no tensors are refused.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import ReadItem

ALLOWED_MODULES = ("torch.distributed.checkpoint.metadata", "pathlib", "pathlib._local")
ALLOWED = {
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}
"""Besides these, dtypes of ``torch``."""


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of PyTorch's checkpoint metadata, dtypes and paths."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        allowed = module_name in ALLOWED_MODULES or (module_name, global_name) in ALLOWED
        found = super().find_class(module_name, global_name) if allowed or module_name == "torch" else None
        if (
            allowed
            and "." not in global_name
            and (isinstance(found, type) or module_name == "torch.serialization")
        ):
            return found
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"its metadata names {module_name}.{global_name}, which is no tensor")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> described.Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, described.Metadata):
            raise pickle.UnpicklingError("its metadata describes no checkpoint")
        metadata.storage_meta = metadata.storage_meta or described.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor there")


def save(state: dict[str, Any], folder: Path) -> None:
    """Writes ``state`` into the empty ``folder``; every file is synced, the names in the folder are not.

    In a process group every rank calls it with its part.

    Raises:
        OSError: a file cannot be written.
    """
    with _plain_errors():
        # One thread: a failure in another one would pass unseen and leave a checkpoint without its tensors.
        writer = FileSystemWriter(folder, thread_count=1, sync_files=True)
        state_dict_saver.save(state, storage_writer=writer, no_dist=_alone())


def load(state: dict[str, Any], folder: Path) -> None:
    """Reads into the tensors of ``state`` in place.

    Raises:
        ValueError: the folder holds other tensors, or something that is none.
    """
    with _plain_errors():
        state_dict_loader.load(state, storage_reader=_Reader(folder), planner=_Planner(), no_dist=_alone())


def _alone() -> bool:
    return not (dist.is_available() and dist.is_initialized())


REFUSALS = (RuntimeError, ValueError, AssertionError, KeyError, pickle.UnpicklingError, EOFError)
"""What PyTorch raises for a checkpoint that does not fit."""


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What went wrong itself, and not PyTorch's account of it by rank, which is no ``Exception``."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        first = next((c for c in causes if isinstance(c, (OSError, KeyboardInterrupt))), causes[0])
        if isinstance(first, REFUSALS):
            raise ValueError(" ".join(str(first).split())) from None
        raise first from None
