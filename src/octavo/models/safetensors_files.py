"""Safetensors files: read whole sets of shards, written so that a crash or a full disk costs nothing saved.

A set is one ``.safetensors`` file, or a folder with ``model.safetensors`` or with shards and the
``model.safetensors.index.json`` that lists them: the layout of Hugging Face.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

FLOATS: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Stored types whose values stand for themselves. 8-bit ones come with scales in tensors of their own."""


class Stored(NamedTuple):
    """A tensor as it lies in a file: ``dtype`` is safetensors' name of the type."""

    shape: tuple[int, ...]
    dtype: str


class TensorFiles:
    """The tensors of a set: ``tensors`` describes them by name, ``read`` gives one."""

    def __init__(self, handles: Mapping[str, Any], tensors: Mapping[str, Stored]) -> None:
        self._handles = handles
        self.tensors = tensors

    def read(self, name: str) -> Tensor:
        """The tensor called ``name``, on the CPU in the type it is stored in."""
        return self._handles[name].get_tensor(name)


@contextmanager
def opened(path: Path) -> Iterator[TensorFiles]:
    """The set at ``path``: a safetensors file, an index, or a folder with either.

    Only headers are read before a tensor is asked for.

    Raises:
        ValueError: there is no such set, or a part of it is missing, damaged or of another kind.
    """
    files, promised = _files(path)
    handles: dict[str, Any] = {}
    tensors: dict[str, Stored] = {}
    with ExitStack() as stack:
        for file in files:
            handle = stack.enter_context(_open(file))
            for name in handle.keys():  # noqa: SIM118, not a mapping
                part = handle.get_slice(name)
                handles[name], tensors[name] = handle, Stored(tuple(part.get_shape()), part.get_dtype())
        for name, file in promised.items():
            if name not in tensors:
                raise ValueError(
                    f"{str(file)!r} has no tensor {name!r}, which the index promises: copy all files again"
                )
        yield TensorFiles(handles, tensors)


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise ValueError(f"{str(file)!r} is missing: copy all files of the model there") from None
    except SafetensorError as error:
        raise ValueError(
            f"{str(file)!r} is no whole safetensors file ({error}): copy or download it again"
        ) from None
    except OSError as error:
        raise ValueError(f"cannot read {str(file)!r} ({error.strerror or error})") from None


def _files(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """Files of the set at ``path``, and the file in which an index promises each tensor."""
    if path.is_dir():
        if (path / SINGLE).exists():
            return [path / SINGLE], {}
        if not (path / INDEX).exists():
            raise ValueError(f"{str(path)!r} has neither {SINGLE} nor {INDEX}: give a folder with a model")
        path = path / INDEX
    if not path.exists():
        raise ValueError(f"{str(path)!r} does not exist: give a safetensors file or a folder with a model")
    if path.suffix != ".json":
        return [path], {}
    content = read_json(path)
    listed = content.get("weight_map")
    if not (isinstance(listed, dict) and listed and all(isinstance(f, str) for f in listed.values())):
        raise ValueError(f"{str(path)!r} is no index of safetensors: it has no 'weight_map' of files")
    promised = {name: path.parent / file for name, file in listed.items()}
    return sorted(set(promised.values())), promised


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file at ``path``.

    Raises:
        ValueError: it cannot be read or is no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r} ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is no JSON ({error}): copy or download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} is no JSON object: copy or download it again")
    return content


# --- writing
# -----------------------------------------------------------------------------------------------------


def shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Names in order, in groups of at most ``max_bytes``; a larger tensor has a group of its own."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


class Writer:
    """Writes files of a folder under temporary names; ``commit`` gives them their own, all or none before it.

    An error while anything is written, such as a full disk, leaves what was in the folder as it was.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written: list[str] = []

    def __enter__(self) -> Writer:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._written:
            self._temporary(name).unlink(missing_ok=True)

    def _temporary(self, name: str) -> Path:
        """Hidden and always the same, so that what a killed process left is written over, not gathered."""
        return self.folder / f".{name}.tmp"

    def tensors(self, name: str, tensors: dict[str, Tensor]) -> None:
        """A safetensors file called ``name``; ``tensors`` are contiguous and on the CPU.

        Raises:
            OSError: it cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        temporary = self._begin(name)
        mode = temporary.stat().st_mode  # the library may put a private file of its own in this place
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            raise _as_os_error(error, self.folder / name) from None
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())

    def json(self, name: str, content: Mapping[str, Any]) -> None:
        """A JSON file called ``name``.

        Raises:
            OSError: it cannot be written.
        """
        with self._begin(name).open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())

    def _begin(self, name: str) -> Path:
        self._written.append(name)
        temporary = self._temporary(name)
        temporary.unlink(missing_ok=True)
        temporary.touch()
        return temporary

    def commit(self, first: Iterable[str] = (), last: Iterable[str] = ()) -> list[Path]:
        """Puts the files in place in the order they were written, removing ``first`` before and ``last`` after.

        Returns their paths.
        """
        for name in first:
            (self.folder / name).unlink(missing_ok=True)
        for name in self._written:
            self._temporary(name).replace(self.folder / name)
        for name in last:
            (self.folder / name).unlink(missing_ok=True)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return [self.folder / name for name in self._written]


def _as_os_error(error: Exception, path: Path) -> OSError:
    """The ``OSError`` that the library's message tells of ("... (os error 28)")."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number is None:
        return OSError(None, str(error), str(path))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path))
