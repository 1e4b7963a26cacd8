"""What follows a run step by step besides the screen: a JSONL file and TensorBoard."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from octavo.trainer import operand_stats
from octavo.trainer.config import TrainConfig
from octavo.trainer.files import writing
from octavo.trainer.journal import Journal
from octavo.trainer.records import Step

Watcher = Callable[[Step], None]


@contextlib.contextmanager
def watchers(config: TrainConfig, recipe: str, after: int) -> Iterator[list[Watcher]]:
    """Those that ``config`` asks for, to be called with every step that follows step ``after``.

    Raises:
        WriteError: a file cannot be written, here or in a call.
    """
    with contextlib.ExitStack() as stack:
        found: list[Watcher] = []
        if config.log:
            found.append(_to_log(stack, config, recipe, after))
        if config.tensorboard:
            found.append(_to_tensorboard(stack, config.tensorboard / recipe, after))
        yield found


def _to_log(stack: contextlib.ExitStack, config: TrainConfig, recipe: str, after: int) -> Watcher:
    """Keeps what other recipes and earlier steps of this one wrote, so that no step stands there twice."""
    assert config.log
    # A job that is not resumed starts the file with its first recipe.
    fresh = not config.resume and recipe == config.recipes[0]

    def keep(record: dict[str, Any]) -> bool:
        return not fresh and (record.get("recipe") != recipe or record.get("step", 0) <= after)

    journal = stack.enter_context(Journal(config.log, keep))

    def write(step: Step) -> None:
        values = dataclasses.asdict(step)
        rate = config.tokens_per_step / step.seconds
        journal.write({"recipe": recipe, "step": values.pop("number"), **values, "tokens_per_second": rate})

    return write


def _to_tensorboard(stack: contextlib.ExitStack, folder: Path, after: int) -> Watcher:
    from torch.utils.tensorboard import SummaryWriter

    # What an earlier run wrote there about the steps to come goes out of sight.
    with writing(folder):
        writer = SummaryWriter(str(folder), purge_step=after + 1)

    def close() -> None:
        with writing(folder):
            writer.close()

    stack.callback(close)

    def write(step: Step) -> None:
        values = dataclasses.asdict(step)
        number = values.pop("number")
        for operand in values.pop("operands") or ():
            place = "/".join(operand[part] for part in operand_stats.NAMES)
            values |= {f"{name}/{place}": operand[name] for name in operand_stats.MEASURES}
        with writing(folder):
            for name, value in values.items():
                if value is not None:
                    writer.add_scalar(name, value, number)

    return write
