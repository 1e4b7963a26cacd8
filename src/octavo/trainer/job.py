"""A training job from its first check to its last file."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from octavo import models
from octavo.errors import UserError
from octavo.trainer import data, report
from octavo.trainer.checkpoint import Checkpoints, Saved, fingerprint
from octavo.trainer.config import TrainConfig, check_writable
from octavo.trainer.data import Corpus
from octavo.trainer.files import WriteError, remedy
from octavo.trainer.loop import train
from octavo.trainer.progress import RunProgress
from octavo.trainer.records import Run, Step
from octavo.trainer.stopping import Stopping
from octavo.trainer.watchers import watchers

EXIT_FINISHED, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130


def prepare(config: TrainConfig) -> Corpus:
    """Everything that can be refused before anything is trained, but for checkpoints; returns the text.

    Raises:
        UserError: the job cannot be done as asked.
    """
    config.check()
    corpus = data.load(
        config.data, config.seq_len, config.tokenizer, model_vocab=models.preset(config.model).vocab_size
    )
    for option, folder in (
        ("--out", config.out),
        ("--checkpoint-dir", config.checkpoint_dir),
        ("--save-final", config.save_final),
        ("--tensorboard", config.tensorboard),
        ("--log", config.log and config.log.parent),
    ):
        if folder is not None:
            check_writable(folder, option)
    if config.log and config.log.is_dir():
        raise UserError(f"--log {str(config.log)!r} is a folder: give the name of a file")
    if config.save_final and config.save_final.suffix == ".safetensors":
        raise UserError(
            f"--save-final {str(config.save_final)!r} is to be a folder: give a name without .safetensors"
        )
    return corpus


def run(config: TrainConfig, corpus: Corpus, console: Console, command: str) -> int:
    """Trains every recipe, shows and writes the report; returns the exit status of the process.

    The report is written after each run, and holds the steps of one that ended early. A disk that fills up
    meanwhile costs the files, not the table. The first Ctrl-C or SIGTERM ends the job after the step that runs.

    Args:
        command: the command line that asks for this, for the report and to say how to go on.

    Raises:
        UserError: the checkpoint folder does not fit the job.
    """
    _line(
        console,
        f"{config.model}, {report.parameter_count(config.model):,} parameters, {config.dtype} weights, "
        f"{report.device_name(config.device)}; text: {corpus.source}, {corpus.files} files, "
        f"{len(corpus.train) + len(corpus.validation):,} {_unit(corpus)}",
    )
    places = {recipe: _checkpoints(config, corpus, recipe) for recipe in config.recipes}
    starts = {recipe: _start(config, recipe, place, console) for recipe, place in places.items()}
    runs: list[Run] = []
    written: list[Path] | OSError = []
    with Stopping() as stopping:
        for recipe in config.recipes:
            start = starts[recipe]
            if isinstance(start, Run):
                runs.append(start)
            else:
                runs.append(_train(config, corpus, recipe, places[recipe], start, console, stopping))
            written = _try_to_write(config, corpus, runs, command)
            if runs[-1].status != "finished" or (stopping() and recipe != config.recipes[-1]):
                break
    console.print(report.table(report.as_data(config, corpus, runs, command)))
    status = _conclude(config, runs[-1], places[runs[-1].recipe], stopping, console, command)
    if isinstance(written, OSError):
        path = written.filename or config.out
        again = "run it again with --resume" if config.checkpoint_dir else "train again"
        _line(console, f"cannot write {path} ({written.strerror}): {remedy(written)} and {again}", "red")
        return status or EXIT_FAILED
    _line(console, f"written: {', '.join(map(str, written))}")
    return status


def _unit(corpus: Corpus) -> str:
    return "bytes" if corpus.tokenizer == "bytes" else "tokens"


def _checkpoints(config: TrainConfig, corpus: Corpus, recipe: str) -> Checkpoints | None:
    """Where the run of ``recipe`` keeps its checkpoints: a folder for each recipe."""
    if config.checkpoint_dir is None:
        return None
    return Checkpoints(
        config.checkpoint_dir / recipe,
        fingerprint(config, recipe, corpus),
        every=config.checkpoint_steps,
        last=config.steps,
        keep=config.keep,
    )


def _start(
    config: TrainConfig, recipe: str, checkpoints: Checkpoints | None, console: Console
) -> Saved | Run | None:
    """What to go on from: a checkpoint, a whole run that needs no more training, or nothing."""
    if checkpoints is None:
        return None
    if not config.resume:
        if checkpoints.used:
            raise UserError(
                f"{str(checkpoints.folder)!r} holds the checkpoints of an earlier run: go on with it by "
                f"--resume, or give another --checkpoint-dir"
            )
        return None
    finished = checkpoints.finished()
    whole = Run(**finished, steps=checkpoints.history(), status="finished") if finished else None
    if whole and not config.save_final:
        return whole
    # What lies in --save-final may be another run's weights, so a finished run writes its own again.
    saved = checkpoints.find(lambda text: _line(console, text, "yellow"))
    if whole and saved is None:
        raise UserError(
            f"the run in {str(checkpoints.folder)!r} is finished but has no checkpoint any more to write "
            f"--save-final from: leave that option out, or train anew in another --checkpoint-dir"
        )
    if saved is None:
        _line(console, f"{recipe}: no checkpoint yet in {str(checkpoints.folder)!r}, starting at step 1")
    return saved


def _train(
    config: TrainConfig,
    corpus: Corpus,
    recipe: str,
    checkpoints: Checkpoints | None,
    saved: Saved | None,
    console: Console,
    stopping: Stopping,
) -> Run:
    if saved:
        _line(console, f"{recipe}: going on after step {saved.step}, from {str(saved.path)!r}")
    after = saved.step if saved else 0
    try:
        with watchers(config, recipe, after) as followers, RunProgress(console, config, recipe) as progress:

            def on_step(step: Step) -> None:
                for follow in (progress, *followers):
                    follow(step)

            return train(
                config,
                recipe,
                corpus,
                on_step,
                on_start=progress.begin,
                checkpoints=checkpoints,
                saved=saved,
                stop=stopping,
            )
    except WriteError as error:  # in opening or closing what follows the run
        return Run(recipe, status="unwritable", failure=str(error))


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
    from octavo.trainer import report_files

    content = report.as_data(config, corpus, runs, command)
    return report_files.write(content, config.out)


def _conclude(
    config: TrainConfig,
    last: Run,
    checkpoints: Checkpoints | None,
    stopping: Stopping,
    console: Console,
    command: str,
) -> int:
    """Says how the job ended and how to go on with it; returns the exit status."""
    saved = checkpoints.saved if checkpoints else None
    kept = f"; the last good checkpoint is {str(saved)!r}" if saved else ""
    resume = command if config.resume else f"{command} --resume"
    on = f"; go on with: {resume}" if checkpoints else "; nothing is kept without --checkpoint-dir"
    if last.status == "non-finite":
        step = last.steps[-1]
        where = f", first in {last.failure}" if last.failure else ""
        _line(
            console,
            f"{last.recipe} stopped at step {step.number}: loss {step.loss}, gradient norm {step.grad_norm}"
            f"{where}; lower --lr or lengthen --warmup (the report holds the {step.number - 1} good steps "
            f"before it){kept}",
            "red",
        )
        return EXIT_FAILED
    if last.status == "unwritable":
        _line(console, f"{last.recipe} stopped: {last.failure}{kept}{on}", "red")
        return EXIT_FAILED
    if last.status == "out-of-memory":
        _line(
            console,
            f"{last.recipe} stopped: {last.failure}; raise --grad-accum, lower --batch-size or --seq-len, or add "
            f"--activation-checkpoint{kept}",
            "red",
        )
        return EXIT_FAILED
    if last.status == "interrupted":
        done = last.steps[-1].number if last.steps else 0
        _line(console, f"{last.recipe} was interrupted after step {done}{kept}{on}", "yellow")
        return stopping.exit_status
    if stopping() and len(config.recipes) > 1 and last.recipe != config.recipes[-1]:
        _line(console, f"interrupted after {last.recipe} was finished{on}", "yellow")
        return stopping.exit_status
    return EXIT_FINISHED
