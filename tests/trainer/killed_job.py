"""A program for tests: one job in a process that ends by SIGKILL at a chosen moment, again and again.

``python killed_job.py FOLDER OPTIONS`` with OPTIONS as JSON: ``moments``, a list of ``[kind, when]``, each of
which ends one attempt, and ``config``, what is left of a ``TrainConfig``. The moments are, with "event", the
``when``-th time that a file in the checkpoint folder is opened, renamed or removed, just before it happens;
with "write", in the middle of the ``when``-th part of a file of tensors; with "step", after that many steps;
and with "time", after a share of what the whole job takes, from another process. An attempt begins where the
last one was killed, and after all of them one runs to its end. With ``sweep``, each event is the moment of a job
of its own, below ``killed-NUMBER``. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from octavo import models
from octavo.models import Llama3Config
from octavo.trainer import job as jobs
from octavo.trainer import loop
from octavo.trainer.config import TrainConfig

TINY = Llama3Config(dim=32, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=64, vocab_size=256, max_seq_len=32)
EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def watch_events(folder: Path, when: int) -> list[str]:
    """Dies at event ``when`` (from 1) in ``folder``, 0 for never; returns the list that events go to."""
    seen: list[str] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS and isinstance(args[0], str | os.PathLike) and str(folder) in str(args[0]):
            seen.append(f"{event} {os.path.basename(args[0])}")
            if len(seen) == when:
                die()

    sys.addaudithook(hook)
    return seen


def watch_writes(when: int) -> None:
    """Dies after half of a tensor's bytes are in the file, the ``when``-th time (from 1)."""
    save, calls = torch.save, iter(range(1, 10**6))

    def half(value: Any, stream: Any, *args: Any, **options: Any) -> None:
        if next(calls) == when:
            stream.write(b"\0" * (value.nbytes // 2))
            stream.flush()
            die()
        save(value, stream, *args, **options)

    torch.save = half


def watch_steps(when: int) -> None:
    original, calls = loop.Trainer.step, iter(range(1, 10**6))

    def step(self: loop.Trainer, number: int) -> Any:
        done = original(self, number)
        if next(calls) == when:
            die()
        return done

    loop.Trainer.step = step  # type: ignore[method-assign]


def attempt(config: TrainConfig, kind: str, when: float, seconds: float) -> int:
    """One process; returns the status that it ended with, as ``waitpid`` has it."""
    child = os.fork()
    if not child:
        if kind == "event":
            assert config.checkpoint_dir
            watch_events(config.checkpoint_dir, int(when))
        elif kind == "write":
            watch_writes(int(when))
        elif kind == "step":
            watch_steps(int(when))
        os._exit(go(config))
    if kind == "time":
        time.sleep(when * seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def go(config: TrainConfig) -> int:
    """The job itself; what it says goes to a file."""
    output = StringIO()
    try:
        status = jobs.run(
            config, jobs.prepare(config), Console(file=output, width=100), command="octavo train"
        )
    except BaseException as error:  # the parent shows it
        status = 99
        output.write(repr(error))
    (config.out / f"said-{time.time_ns()}.txt").write_text(output.getvalue())
    return status


def sweep(fields: dict[str, Any], folder: Path, events: int) -> list[list[int]]:
    """A job for each event, killed there once and gone on with; how the two attempts of each ended."""
    ended = []
    for number in range(1, events + 1):
        config = TrainConfig(**fields, checkpoint_dir=folder / f"killed-{number}", resume=True)
        ended.append([attempt(config, "event", number, 0), attempt(config, "none", 0, 0)])
    return ended


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    models.PRESETS["tiny"] = TINY
    jobs.write = lambda config, corpus, runs, command: []  # plots take longer than the rest
    text = folder / "text.txt"
    text.write_text("".join(f"{n} bottles of beer on the wall, {n} bottles of beer.\n" for n in range(120)))
    fields = {"model": "tiny", "data": text, "seq_len": 16, "batch_size": 2, "out": folder / "out"}
    fields |= options["config"] | {"recipes": tuple(options["config"]["recipes"])}

    begin = time.perf_counter()
    plain = TrainConfig(**fields, checkpoint_dir=folder / "plain")
    seen = watch_events(folder / "plain", 0)
    assert go(plain) == 0
    seconds, events = time.perf_counter() - begin, len(seen)

    if options.get("sweep"):
        print(json.dumps({"seen": seen, "ended": sweep(fields, folder, events)}))
        return
    config = TrainConfig(**fields, checkpoint_dir=folder / "killed", resume=True)
    ended = []
    for kind, when in options["moments"]:
        ended.append([kind, when, attempt(config, kind, when, seconds)])
    status = attempt(config, "none", 0, seconds)
    said = [path.read_text() for path in sorted(config.out.glob("said-*.txt"))]
    print(json.dumps({"events": events, "seen": seen, "ended": ended, "status": status, "said": said[1:]}))


if __name__ == "__main__":
    main()
