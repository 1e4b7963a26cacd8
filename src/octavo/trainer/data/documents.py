"""Documents out of text files, folders of them and JSONL.

A text file is one document, a line of a JSONL file is one. A folder is read in order of names, without hidden
files and folders, and without files that hold no text.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import UserError

# Tests come and go with a distribution's packaging, and installed packages differ from machine to machine.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
MAX_BYTES = 8 * 2**30
READ_BYTES = 2**24
JSONL_ENDINGS = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Document:
    """One text, and where it stands: its file and, in JSONL, the line from 1."""

    text: bytes
    path: Path
    line: int | None = None

    @property
    def where(self) -> str:
        """Where it stands in words, for messages about it."""
        return repr(str(self.path)) if self.line is None else _line(self.path, self.line)


@dataclass(frozen=True)
class Source:
    """Files to read documents from, and a name for all of them."""

    name: str
    paths: list[Path]


def standard_library() -> list[Path]:
    """The standard library's own ``.py`` files, sorted, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    return [path for path in _walk(root, SKIPPED_FOLDERS) if path.suffix == ".py"]


def find(data: Path | None) -> Source:
    """The files of ``data``: a file, a folder, or None for the Python standard library's source.

    Raises:
        UserError: there is no such file or folder, or the standard library's source is not on this machine.
    """
    if data is None:
        paths = standard_library()
        if not paths:
            raise UserError(
                "the Python standard library's source is not on this machine: give a text with --data"
            )
        return Source("the Python standard library's source", paths)
    if data.is_dir():
        return Source(str(data), list(_walk(data)))
    if data.exists():
        return Source(str(data), [data])
    raise UserError(f"--data {str(data)!r} does not exist: give a text file, JSONL or a folder of them")


def read(source: Source) -> Iterator[Document]:
    """The documents of ``source`` that hold text, one file in memory at a time.

    Raises:
        UserError: a file cannot be read, all together are larger than 8 GiB, or a line of JSONL is no object
            with a ``text``.
    """
    room = MAX_BYTES
    for path in source.paths:
        content = _content(path, room)
        room -= len(content)
        if room < 0:
            raise UserError(
                f"--data {source.name!r} is larger than 8 GiB, which are kept in memory: give a part of it"
            )
        if path.name.endswith(JSONL_ENDINGS):
            yield from _json_lines(content, path)
        elif content and _is_text(content):
            yield Document(content, path)


def _walk(root: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files under ``root``, sorted, without hidden files and folders and those folders named in ``skip``."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in skip)
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _content(path: Path, room: int) -> bytes:
    """Bytes of ``path``, unpacked where its name says ``.jsonl.gz``; none for what is no regular file.

    Stops soon after ``room`` bytes: that there are more says enough.
    """
    if not path.is_file():
        return b""
    blocks: list[bytes] = []
    try:
        with gzip.open(path) if path.name.endswith(".jsonl.gz") else path.open("rb") as file:
            while room >= 0 and (block := file.read(READ_BYTES)):
                blocks.append(block)
                room -= len(block)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{str(path)!r} is no whole gzip file ({error}): pack it again") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"cannot read {str(path)!r} ({reason}): make it readable or give other --data"
        ) from None
    return b"".join(blocks)


def _is_text(content: bytes) -> bool:
    """Whether ``content`` looks like text: no zero byte near its start, the rule git uses."""
    return b"\0" not in content[:8192]


def _json_lines(content: bytes, path: Path) -> Iterator[Document]:
    """The ``text`` of every line that has one with something in it; empty lines are passed over."""
    for number, line in enumerate(io.BytesIO(content), 1):
        if not line.strip():
            continue
        where = _line(path, number)
        try:
            value = json.loads(line.rstrip(b"\r\n"))
        except UnicodeDecodeError as error:
            raise UserError(
                f"{where} is not UTF-8 (byte {error.start + 1} of the line): convert it"
            ) from None
        except (ValueError, RecursionError) as error:
            what = str(error)
            if isinstance(error, json.JSONDecodeError):
                what = f"{error.msg.removesuffix(' at')} at column {error.colno}"
            raise UserError(f"{where} is not JSON ({what}): mend or remove the line") from None
        text = _text_field(value, where)
        if text:
            yield Document(text, path, number)


def _line(path: Path, number: int) -> str:
    return f"{str(path)!r} line {number}"


def _text_field(value: object, where: str) -> bytes:
    if not isinstance(value, dict):
        raise UserError(f'{where} is no JSON object: each line must be like {{"text": "..."}}')
    if "text" not in value:
        fields = ", ".join(map(repr, list(value)[:8])) or "none"
        raise UserError(f"{where} has no 'text' (its fields: {fields}): rename the one that holds the text")
    text = value["text"]
    if not isinstance(text, str):
        raise UserError(f"{where} has a 'text' that is {_json_name(text)}: it must be a string")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where} has a 'text' with half a surrogate pair: it is no Unicode text") from None


def _json_name(value: object) -> str:
    names = {type(None): "null", bool: "a boolean", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")
