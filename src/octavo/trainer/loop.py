"""Training one model with one recipe."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from octavo import models
from octavo.errors import UserError
from octavo.trainer import blocks, data, files, flops, memory, nonfinite, operand_stats, peaks
from octavo.trainer.checkpoint import Checkpoints, Saved, run_as_data
from octavo.trainer.config import DTYPES, TrainConfig
from octavo.trainer.data import Batches, Corpus, validation_batches
from octavo.trainer.files import WriteError, writing
from octavo.trainer.optimizer import MasterAdamW
from octavo.trainer.records import Run, Step


def next_token_loss(model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    """Mean cross-entropy in nats a token, float32, of inputs and targets [B, S]."""
    inputs, targets = (part.to(device) for part in batch)
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def build_model(config: TrainConfig, recipe: str) -> tuple[models.Model, int]:
    """The model in ``recipe`` with weights from the seed or a file, and how many layers are in the recipe.

    Raises:
        UserError: the file does not hold this model's weights.
    """
    model = models.preset(config.model).build(config.device, DTYPES[config.dtype])
    if config.init_from is None:
        model.init_weights(config.seed)
    else:
        try:
            models.load_safetensors(model, config.init_from)
        except ValueError as error:
            raise UserError(f"--init-from: {error}") from None
    changes = {"fast_accum": "all"} if config.fast_accum else {}
    report = octavo.convert(model, recipe=octavo.get_recipe(recipe, **changes), min_size=0)
    return model, len(report.converted)


class Trainer:
    """A model in a recipe, its optimizer and its data.

    ``step`` is all that training is; ``state`` holds every tensor that the next step depends on.
    """

    def __init__(self, config: TrainConfig, recipe: str, corpus: Corpus) -> None:
        self.config, self.corpus, self.device = config, corpus, torch.device(config.device)
        torch.manual_seed(config.seed)
        self.model, self.converted = build_model(config, recipe)
        self.optimizer = MasterAdamW(self.model.named_parameters(), config.weight_decay)
        self.batches = Batches(corpus.train, config.seq_len, config.batch_size, config.seed)
        self.flops = self._count_flops()
        blocks.prepare(self.model, compile=config.compile, recompute=config.activation_checkpoint)
        memory.reset_peak(self.device)
        self.peak: int | None = None

    def _count_flops(self) -> dict[str, int]:
        """FLOPs of a step by operator, from its first sequence: a whole batch may not fit without recomputing.

        Outside the run; it also warms up whatever is slow the first time.
        """
        inputs, targets = self.batches(0)
        first = (inputs[:1], targets[:1])
        self.model.eval()  # what a model gathers in training for ``after_step`` is of its steps alone
        counted = flops.count(lambda: next_token_loss(self.model, first, self.device).backward())
        self.model.train()
        self.optimizer.zero_grad()
        return {operator: n * self.config.batch_size for operator, n in counted.items()}

    def backward(self, number: int) -> Tensor:
        """Adds the gradient of step ``number`` (from 0); returns its loss, the mean over all its tokens.

        The parts of a batch are equal, so the mean of their means is that of the batch, and its weights are
        quantized once.
        """
        parts = self.config.grad_accum
        inputs, targets = self.batches(number)
        total = torch.zeros((), device=self.device)
        with octavo.accumulate() if parts > 1 else contextlib.nullcontext():
            for batch in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
                loss = next_token_loss(self.model, batch, self.device) / parts
                loss.backward()
                total += loss.detach()
        return total

    def step(self, number: int) -> Step:
        """Trains on step ``number`` (from 0). A loss or gradient that is no number leaves the weights alone."""
        begin, every = time.perf_counter(), self.config.monitor_steps
        watch = bool(every) and (number + 1) % every == 0
        with operand_stats.watching(self.model, watch) as watched:
            loss = self.backward(number)
        norm = self.optimizer.clip(self.config.clip)
        loss_value, norm_value = torch.stack([loss, norm]).tolist()  # the step's one wait for the device
        rate = self.config.learning_rate(number)
        step = Step(number + 1, loss_value, norm_value, rate, seconds=0.0)
        if step.finite:
            self.optimizer.step(rate)
            self.model.after_step()
        seconds = time.perf_counter() - begin
        share = peaks.mfu(self.flops, seconds, self.device, DTYPES[self.config.dtype])
        operands = operand_stats.read(watched) if watched else None
        peak = self._peak_memory(unlike_others=watched is not None)
        return replace(step, seconds=seconds, peak_memory=peak, mfu=share, operands=operands)

    def _peak_memory(self, *, unlike_others: bool) -> int | None:
        """Most bytes up to now, None if that is not known; what an ``unlike_others`` step took is left out."""
        if unlike_others:
            memory.reset_peak(self.device)
        else:
            self.peak = max(self.peak or 0, memory.peak(self.device))
        return self.peak

    def first_bad(self, number: int) -> str | None:
        """Layer, product and tensor of step ``number`` (from 0) that first held a NaN or inf, as words.

        None where it does not come up again. Computes the step once more, so its weights must be those it had,
        and leaves no gradient.
        """
        self.optimizer.zero_grad()
        try:
            place = nonfinite.first_bad(self.model, lambda: self.backward(number))
        except torch.OutOfMemoryError:
            return None  # watching takes memory of its own, and the run's steps are worth more than this
        finally:
            self.optimizer.zero_grad()
        return str(place) if place else None

    def save_weights(self, folder: Path) -> None:
        """Writes the weights as safetensors, the tokenizer's files beside them, and what transformers needs.

        The weights come last: a folder that has them has the rest.

        Raises:
            WriteError: the folder cannot be written.
        """
        end = self.corpus.end_of_text
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name, file in data.tokenizer_files(self.config.tokenizer).items():
                files.copy(file, folder / name)
            models.save_safetensors(
                self.model, folder, extra_config={} if end is None else {"eos_token_id": end}
            )

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss on held-out text, in nats a token."""
        total, tokens = 0.0, 0
        for batch in validation_batches(self.corpus.validation, self.config.seq_len, self.config.batch_size):
            total += float(next_token_loss(self.model, batch, self.device)) * batch[0].numel()
            tokens += batch[0].numel()
        return total / tokens

    def state(self) -> dict[str, Any]:
        """Tensors of model, optimizer and random numbers; the first two are the very ones.

        Text has no position of its own, it follows from the step, and a step ends with nothing accumulated.
        """
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "random": random}

    def restore(self, checkpoints: Checkpoints, saved: Saved) -> None:
        """Takes over the state in ``saved``."""
        state = self.state()
        checkpoints.load(saved, state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"]["cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"]["cuda"], self.device)


def train(
    config: TrainConfig,
    recipe: str,
    corpus: Corpus,
    on_step: Callable[[Step], None],
    *,
    on_start: Callable[[Run], None] = lambda run: None,
    checkpoints: Checkpoints | None = None,
    saved: Saved | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Run:
    """Trains one model; calls ``on_start`` before the first step and ``on_step`` after each.

    Ends early, with the steps done so far, on a non-finite loss or gradient (before it reaches the weights),
    when ``stop()`` becomes true, on a second Ctrl-C, when something cannot be written and when the device's
    memory does not suffice; ``Run.status`` says which.

    Args:
        checkpoints: where to keep them; the newest is of the step that the run ended with, if that was good.
        saved: the checkpoint to go on from.
    """
    run, first = Run(recipe), saved.step if saved else 0
    begin = time.perf_counter() - (saved.run["wall_seconds"] if saved else 0.0)
    try:
        with checkpoints or contextlib.nullcontext():
            if checkpoints:
                run.steps = checkpoints.begin(first)
            trainer = Trainer(config, recipe, corpus)
            run.converted, run.flops = trainer.converted, trainer.flops
            if checkpoints and saved:
                trainer.restore(checkpoints, saved)
            on_start(run)
            _steps(trainer, run, range(first, config.steps), on_step, checkpoints, stop, begin)
            if run.status == "running":
                _finish(trainer, run, checkpoints, begin)
    except KeyboardInterrupt:
        run.status = "interrupted"
    except WriteError as error:
        run.status, run.failure = "unwritable", str(error)
    except torch.OutOfMemoryError as error:
        run.status, run.failure = "out-of-memory", str(error).strip().partition("\n")[0].partition(". ")[0]
    run.wall_seconds = time.perf_counter() - begin
    return run


def _steps(
    trainer: Trainer,
    run: Run,
    numbers: range,
    on_step: Callable[[Step], None],
    checkpoints: Checkpoints | None,
    stop: Callable[[], bool],
    begin: float,
) -> None:
    """Trains the steps ``numbers`` (from 0); ``run.status`` stays "running" if all were good."""
    validate = trainer.config.eval_every
    for number in numbers:
        if stop():
            run.status = "interrupted"
            if number:
                _save(trainer, run, checkpoints, number, begin)
            return
        step = trainer.step(number)
        if validate and step.finite and step.number % validate == 0:
            step = replace(step, validation_loss=trainer.validate())
        run.steps.append(step)
        on_step(step)
        if not step.finite:
            run.status, run.failure = "non-finite", trainer.first_bad(number)
            return
        if checkpoints:
            checkpoints.record(step)
            if checkpoints.due(step.number):
                _save(trainer, run, checkpoints, step.number, begin)


def _save(trainer: Trainer, run: Run, checkpoints: Checkpoints | None, step: int, begin: float) -> None:
    if checkpoints:
        run.wall_seconds = time.perf_counter() - begin
        checkpoints.save(step, trainer.state(), run_as_data(run))


def _finish(trainer: Trainer, run: Run, checkpoints: Checkpoints | None, begin: float) -> None:
    """Validates, and writes what a finished run leaves."""
    config = trainer.config
    validated = run.steps[-1].validation_loss if run.steps else None
    run.validation_loss = trainer.validate() if validated is None else validated
    if config.save_final:
        trainer.save_weights(config.final_folder(run.recipe))
    run.status, run.wall_seconds = "finished", time.perf_counter() - begin
    if checkpoints:
        checkpoints.finish(run_as_data(run))
