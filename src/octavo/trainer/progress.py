"""The live line of a training run: step, loss, gradient norm, speed, memory and time left."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from octavo.trainer import flops
from octavo.trainer.config import TrainConfig
from octavo.trainer.records import Run, Step

LINES = 10
"""How many lines a run prints where there is no terminal to redraw one on."""


def duration(seconds: float) -> str:
    """``seconds`` in words short enough for a line: 42 s, 12 min, 3.5 h, 2.1 d."""
    for unit, length, digits in (("d", 86_400, 1), ("h", 3600, 1), ("min", 60, 0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.{digits}f} {unit}"
    return f"{seconds:.0f} s"


class RunProgress:
    """Shows the steps of one run: one redrawn line on a terminal, about ``LINES`` plain lines anywhere
    else."""

    def __init__(self, console: Console, config: TrainConfig, recipe: str) -> None:
        self.console, self.config, self.recipe = console, config, recipe
        self.seconds, self.seen = 0.0, 0
        self.fp8_share = 0.0
        self.bar: Progress | None = None
        if console.is_terminal:
            self.bar = Progress(
                TextColumn(f"[bold]{recipe}[/bold]"),
                TextColumn("{task.fields[text]}"),
                BarColumn(bar_width=24),  # last, so that a narrow terminal shortens it and not the numbers
                console=console,
            )
            self.task = self.bar.add_task(recipe, total=config.steps, text="preparing")

    def __enter__(self) -> RunProgress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar:
            self.bar.stop()

    def begin(self, run: Run) -> None:
        """Takes what is known of the run before its first step."""
        self.fp8_share = flops.fp8_share(run.flops)

    def __call__(self, step: Step) -> None:
        """Takes a finished step."""
        self.seconds += step.seconds
        self.seen += 1
        due = step.number % max(1, self.config.steps // LINES) == 0 or step.number in (1, self.config.steps)
        if self.bar:
            self.bar.update(self.task, completed=step.number, text=self.text(step))
        elif due or self.seen == 1 or step.validation_loss is not None:
            self.console.print(
                f"{self.recipe}  {self.text(step)}", soft_wrap=True, highlight=False, markup=False
            )

    def text(self, step: Step) -> str:
        """The step as one line; the time left is that of the steps that remain at the mean pace so far."""
        left = self.seconds / self.seen * (self.config.steps - step.number)
        parts = [
            f"step {step.number}/{self.config.steps}",
            f"loss {step.loss:.4f}",
            f"held-out {step.validation_loss:.4f}" if step.validation_loss is not None else "",
            f"grad norm {step.grad_norm:.2f}",
            f"{self.config.tokens_per_step / step.seconds:,.0f} tokens/s",
            f"{step.peak_memory / 2**30:.1f} GiB" if step.peak_memory is not None else "",
            f"{self.fp8_share:.0%} FP8" if self.fp8_share else "",
            f"{step.mfu:.1%} MFU" if step.mfu is not None else "",
            f"{duration(left)} left",
        ]
        return "  ".join(filter(None, parts))
