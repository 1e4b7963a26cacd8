"""Nested dictionaries of tensors in a folder, through ``torch.distributed.checkpoint``, and back in place.

PyTorch keeps its metadata as a pickle, and reads values that are no tensors as pickles too. Either could run
code from a folder that somebody else made. So the metadata is read first by an unpickler that knows PyTorch's
description of tensors and nothing else, and a folder that holds anything but tensors is refused.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

METADATA = ".metadata"
"""Where ``torch.distributed.checkpoint`` keeps what a folder holds."""

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


def save(state: dict[str, Any], folder: Path) -> None:
    """Writes ``state`` into the empty ``folder``; every file is synced, the names in the folder are not.

    In a process group every rank calls it with its part.

    Raises:
        OSError: a file cannot be written.
    """
    with _plain_errors():
        # One thread: a failure in another one would pass unseen and leave a checkpoint without its tensors.
        writer = FileSystemWriter(folder, thread_count=1, sync_files=True)
        save_checkpoint(state, storage_writer=writer, no_dist=_alone())


def load(state: dict[str, Any], folder: Path) -> None:
    """Reads into the tensors of ``state`` in place.

    Raises:
        ValueError: the folder holds other tensors, or something that is none.
    """
    with _plain_errors():
        _check(folder / METADATA)
        load_checkpoint(state, storage_reader=FileSystemReader(folder), no_dist=_alone())


def _check(path: Path) -> None:
    """Proves that the metadata in ``path`` describes tensors alone, before PyTorch's unpickler sees it."""
    with path.open("rb") as file:
        content = _MetadataUnpickler(file).load()
    if not isinstance(content, Metadata):
        raise pickle.UnpicklingError("its metadata describes no checkpoint")
    for name, value in content.state_dict_metadata.items():
        if not isinstance(value, TensorStorageMetadata):
            raise pickle.UnpicklingError(f"{name} is no tensor there")


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
        raise _plain([cause for cause, _ in error.failures.values()]) from None
    except REFUSALS as error:
        raise _plain([error]) from None


def _plain(failures: list[BaseException]) -> BaseException:
    """The failure that explains the others: an interruption, then a file's, then any as a ``ValueError``.

    Where a file takes no more, PyTorch's archive writer complains of its position first.
    """
    chains = [list(_chain(failure)) for failure in failures]
    for kind in (KeyboardInterrupt, OSError):
        for error in (error for chain in chains for error in chain):
            if isinstance(error, kind):
                return error
    first = failures[0]
    return ValueError(" ".join(str(first).split())) if isinstance(first, REFUSALS) else first


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
