"""A training job from its first check to its last file."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from octavo.trainer import data, report
from octavo.trainer.config import TrainConfig, check_writable
from octavo.trainer.data import Corpus
from octavo.trainer.loop import Run, train
from octavo.trainer.progress import RunProgress

EXIT_FINISHED, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130


def prepare(config: TrainConfig) -> Corpus:
    """Everything that can be refused, before anything is trained; returns the text.

    Raises:
        UserError: the job cannot be done as asked.
    """
    config.check()
    corpus = data.load(config.data, config.seq_len)
    check_writable(config.out)
    return corpus


def run(config: TrainConfig, corpus: Corpus, console: Console, command: str) -> int:
    """Trains every recipe, shows and writes the report; returns the exit status of the process.

    The report is written after each run, and holds the steps of one that ended early. A disk that fills up
    meanwhile costs the files, not the table.
    """
    _line(
        console,
        f"{config.model}, {report.parameter_count(config.model):,} parameters, {config.dtype} weights, "
        f"{report.device_name(config.device)}; text: {corpus.source}, {corpus.files} files, "
        f"{len(corpus.train) + len(corpus.validation):,} bytes",
    )
    runs: list[Run] = []
    written: list[Path] | OSError = []
    for recipe in config.recipes:
        with RunProgress(console, config, recipe) as progress:
            runs.append(train(config, recipe, corpus, progress))
        written = _try_to_write(config, corpus, runs, command)
        if runs[-1].status != "finished":
            break
    console.print(report.table(report.as_data(config, corpus, runs, command)))
    status = _conclude(runs[-1], console)
    if isinstance(written, OSError):
        path = written.filename or config.out
        _line(console, f"cannot write {path} ({written.strerror}): make room and train again", "red")
        return status or EXIT_FAILED
    _line(console, f"written: {', '.join(map(str, written))}")
    return status


def _line(console: Console, text: str, style: str | None = None) -> None:
    """Prints ``text`` as it is: one line however narrow the terminal, no markup, no colour but ``style``."""
    console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)


def _try_to_write(config: TrainConfig, corpus: Corpus, runs: list[Run], command: str) -> list[Path] | OSError:
    try:
        return write(config, corpus, runs, command)
    except OSError as error:
        return error


def write(config: TrainConfig, corpus: Corpus, runs: list[Run], command: str) -> list[Path]:
    """Writes the report of the runs so far into ``config.out``; returns the files."""
    from octavo.trainer import plot

    content = report.as_data(config, corpus, runs, command)
    files = [config.out / "report.json", config.out / "loss.png"]
    report.write_json(content, files[0])
    plot.write_png(content, files[1])
    return files


def _conclude(last: Run, console: Console) -> int:
    if last.status == "non-finite":
        step = last.steps[-1]
        _line(
            console,
            f"{last.recipe} stopped at step {step.number}: loss {step.loss}, gradient norm {step.grad_norm}; "
            f"lower --lr or lengthen --warmup (the report holds the {step.number - 1} good steps before it)",
            "red",
        )
        return EXIT_FAILED
    if last.status == "interrupted":
        _line(console, f"{last.recipe} was interrupted after step {len(last.steps)}", "yellow")
        return EXIT_INTERRUPTED
    return EXIT_FINISHED
