"""Checkpoints of one run that a crash at any moment leaves whole.

A folder holds ``step-00000020`` and its like, each PyTorch's own distributed checkpoint with a manifest beside
it; ``steps.jsonl``, the run's steps so far; and ``result.json`` once the run is finished. A checkpoint is
written under a name that nothing reads, with every file synced and the manifest last, and then moved to its
own; older ones are removed after that. So the newest whole checkpoint is always there, and what is not whole
is seen: the manifest gives size and SHA-256 of each file, and of itself.

A manifest says which run it belongs to, option by option, so that another model, recipe, seed or text is
refused by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo import models
from octavo._version import __version__
from octavo.errors import UserError
from octavo.trainer import journal, tensors
from octavo.trainer.config import NEUTRAL, TrainConfig
from octavo.trainer.data import Corpus
from octavo.trainer.files import WriteError, finite, sync_folder, write_json, writing
from octavo.trainer.journal import Journal
from octavo.trainer.records import Run, Step

MANIFEST, RESULT, HISTORY = "manifest.json", "result.json", "steps.jsonl"
SCHEMA = 1
FOREIGN = "is of another run"
NAME = re.compile(r"step-(\d{8,})")
LEFTOVER = re.compile(r"\.step-\d{8,}\.(partial|old)")
"""What a crash can leave behind: a checkpoint half written or half removed."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was found whole. ``run`` is what was known of the run besides its tensors."""

    path: Path
    step: int
    run: dict[str, Any]


def fingerprint(config: TrainConfig, recipe: str, corpus: Corpus) -> dict[str, Any]:
    """What decides every weight of a run, by option; a checkpoint with other values is another run's.

    The text counts by its tokens and not by its path, and a GPU by its kind and not by its number.
    """
    options = config.as_data()
    for name in (*NEUTRAL, "compare", "tokenizer"):
        options.pop(name, None)
    preset = models.preset(config.model)
    dimensions = dataclasses.asdict(preset) if dataclasses.is_dataclass(preset) else {}
    return finite(
        options
        | {"recipe": recipe, "data": corpus.sha256, "device": torch.device(config.device).type}
        | {f"model.{name}": value for name, value in dimensions.items()}
    )


class Checkpoints:
    """The checkpoints of one run in ``folder``.

    Args:
        folder: of this run alone; made when something is saved.
        config: the run's ``fingerprint``.
        every: steps between checkpoints; ``last`` is the last step, which always gets one.
        keep: how many of the newest stay.
    """

    def __init__(self, folder: Path, config: dict[str, Any], *, every: int, last: int, keep: int) -> None:
        self.folder, self.config, self.every, self.last, self.keep = folder, config, every, last, keep
        self.saved: Path | None = None
        """The newest good checkpoint of this run."""
        self._passed_over: set[Path] = set()
        """Those that ``find`` could not use: they stay, and do not count among ``keep``."""
        self._history: Journal | None = None

    @property
    def used(self) -> bool:
        """Whether a run has left something here."""
        return (self.folder / RESULT).exists() or bool(self._all())

    def find(self, warn: Callable[[str], None]) -> Saved | None:
        """The newest checkpoint that is whole and of this run; None where there is none of any kind.

        Calls ``warn`` with one line about those that were passed over.

        Raises:
            UserError: there are checkpoints and none can be used.
        """
        passed: list[str] = []
        for path in reversed(self._all()):
            manifest, problem = self._read(path)
            if manifest is not None:
                problem = _damage(path, manifest)
            if manifest is None or problem:
                passed.append(f"{path.name} {problem}")
                self._passed_over.add(path)
                continue
            if passed:
                warn(f"{'; '.join(passed)}: going on from {str(path)!r}")
            self.saved = path
            return Saved(path, manifest["step"], manifest["run"])
        if passed:
            raise UserError(
                f"no checkpoint in {str(self.folder)!r} can be used: {'; '.join(passed[:3])}: give another "
                f"--checkpoint-dir, or train anew without --resume in an empty one"
            )
        return None

    def finished(self) -> dict[str, Any] | None:
        """What ``finish`` was given, if this run is finished.

        Raises:
            UserError: another run finished here.
        """
        content, problem = self._read_signed(self.folder / RESULT)
        if problem.startswith(FOREIGN):
            raise UserError(
                f"the finished run in {str(self.folder)!r} {problem}: give another --checkpoint-dir"
            )
        return content["run"] if content else None

    def begin(self, after: int) -> list[Step]:
        """Opens the history, cut after the step ``after``, and sweeps up what a crash left; returns the steps.

        Raises:
            WriteError: the folder cannot be written to.
        """
        self._history = Journal(self.folder / HISTORY, lambda record: 0 < _number(record) <= after)
        with writing(self.folder):
            sync_folder(self.folder.parent)  # the folder may have been made just now
            for path in self.folder.iterdir():
                if LEFTOVER.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)
        return [Step(**record) for record in self._history.kept]

    def history(self) -> list[Step]:
        """The steps of a finished run, as far as the file is there."""
        records = journal.read(self.folder / HISTORY)
        return [Step(**record) for record in records if _number(record)]

    def record(self, step: Step) -> None:
        """Adds a step to the history."""
        assert self._history is not None, "begin() comes first"
        self._history.write(dataclasses.asdict(step))

    def due(self, step: int) -> bool:
        """Whether step ``step`` (from 1) is to be followed by a checkpoint."""
        return step % self.every == 0 or step == self.last

    def save(self, step: int, state: dict[str, Any], run: dict[str, Any]) -> None:
        """Writes the checkpoint of step ``step`` and then removes those beyond ``keep``.

        Args:
            state: nested dictionaries of tensors.
            run: JSON values.

        Raises:
            WriteError: the disk is full, or the like; nothing that was saved before is lost.
        """
        path = self.folder / f"step-{step:08d}"
        if self.saved == path:
            return
        partial = self.folder / f".{path.name}.partial"
        with writing(path):
            if self._history:
                self._history.sync()
            try:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                tensors.save(state, partial)
                files = {file.name: _described(file) for file in sorted(partial.iterdir())}
                write_json(partial / MANIFEST, self._signed(step=step, run=run, files=files))
                _set_aside(path)
                os.replace(partial, path)
            except OSError:
                shutil.rmtree(partial, ignore_errors=True)  # makes room again
                raise
            sync_folder(self.folder)
        self.saved = path
        self._passed_over.discard(path)
        with writing(self.folder):
            self._prune(step)

    def load(self, saved: Saved, state: dict[str, Any]) -> None:
        """Reads ``saved`` into the tensors of ``state``, in place.

        Raises:
            UserError: it holds other tensors than these.
        """
        try:
            tensors.load(state, saved.path)
        except ValueError as error:
            raise UserError(f"{str(saved.path)!r} is no checkpoint of this run: {error}") from None

    def finish(self, run: dict[str, Any]) -> None:
        """Marks the run as finished, with what its report needs."""
        with writing(self.folder / RESULT):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / RESULT, self._signed(run=run))

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._history:
            with contextlib.suppress(WriteError):  # what could not be written was said before
                self._history.close()

    def _all(self) -> list[Path]:
        """Checkpoints, oldest first, whole or not."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((p for p in found if NAME.fullmatch(p.name) and p.is_dir()), key=_step_of)

    def _signed(self, **content: Any) -> dict[str, Any]:
        head = {
            "octavo": "checkpoint",
            "schema": SCHEMA,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        versions = {"octavo": __version__, "torch": str(torch.__version__)}
        signed = finite(head | {"versions": versions, "config": self.config} | content)
        return signed | {"sha256": _digest(signed)}

    def _read(self, path: Path) -> tuple[dict[str, Any] | None, str]:
        """The manifest of the checkpoint ``path``, or None and what is wrong with it."""
        if not (path / MANIFEST).exists():
            return None, "is incomplete (no manifest)"
        return self._read_signed(path / MANIFEST)

    def _read_signed(self, path: Path) -> tuple[dict[str, Any] | None, str]:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            signature = content.pop("sha256")
        except OSError as error:
            return None, f"cannot be read ({error.strerror or error})"
        except (ValueError, KeyError, AttributeError, TypeError):
            return None, f"is corrupt ({path.name} is damaged)"
        if signature != _digest(content):
            return None, f"is corrupt ({path.name} is damaged)"
        if content.get("schema") != SCHEMA:
            return None, f"was written by octavo {content['versions']['octavo']}, whose format differs"
        differing = [
            f"{key} is {_short(content['config'].get(key))} there and {_short(self.config.get(key))} here"
            for key in sorted(content["config"].keys() | self.config.keys())
            if content["config"].get(key) != self.config.get(key)
        ]
        if differing:
            return None, f"{FOREIGN}: {', '.join(differing[:3])}"
        return content, ""

    def _prune(self, newest: int) -> None:
        """Removes this run's checkpoints up to step ``newest`` but for the last ``keep``."""
        known = (p for p in self._all() if _step_of(p) <= newest and p not in self._passed_over)
        own = [p for p in known if self._read(p)[0] is not None]
        for path in own[: -self.keep]:
            old = path.with_name(f".{path.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            os.replace(path, old)  # a removal that is cut short leaves nothing under a name that counts
            shutil.rmtree(old)


def _step_of(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match
    return int(match[1])


def _number(record: dict[str, Any]) -> int:
    """The number of the step that ``record`` describes, 0 if it describes none."""
    fields = {field.name for field in dataclasses.fields(Step)}
    number, numbers = (
        record.get("number"),
        (record.get("loss"), record.get("grad_norm"), record.get("seconds")),
    )
    fits = record.keys() == fields and all(isinstance(value, int | float) for value in numbers)
    return number if fits and isinstance(number, int) else 0


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _described(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        return {"size": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def _damage(path: Path, manifest: dict[str, Any]) -> str:
    """What is wrong with the files of the checkpoint ``path``; nothing if they are what was written."""
    for name, described in manifest["files"].items():
        file = path / name
        try:
            if file.stat().st_size != described["size"]:
                return f"is corrupt ({name} has {file.stat().st_size} bytes of {described['size']})"
            if _described(file) != described:
                return f"is corrupt ({name} has other content than was written)"
        except FileNotFoundError:
            return f"is incomplete ({name} is missing)"
        except OSError as error:
            return f"cannot be read ({name}: {error.strerror or error})"
    return ""


def _set_aside(path: Path) -> None:
    """Renames what is in the place of a new checkpoint: one that could not be used, which may be of use yet."""
    if path.exists():
        numbers = (n for n in range(1, 10**6) if not path.with_name(f"{path.name}.replaced-{n}").exists())
        os.replace(path, path.with_name(f"{path.name}.replaced-{next(numbers)}"))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 24 else f"{text[:20]}...{text[-1]}"


def run_as_data(run: Run) -> dict[str, Any]:
    """What a checkpoint keeps of a run besides its steps, which stand in the history."""
    fields = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    return {name: value for name, value in fields.items() if name not in ("steps", "status", "failure")}
