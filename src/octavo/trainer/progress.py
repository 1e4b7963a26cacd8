"""The live line of a training run: step, loss, gradient norm, tokens a second and time left."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from octavo.trainer.config import TrainConfig
from octavo.trainer.loop import Step

LINES = 10
"""How many lines a run prints where there is no terminal to redraw one on."""


class RunProgress:
    """Shows the steps of one run: one redrawn line on a terminal, about ``LINES`` plain lines anywhere
    else."""

    def __init__(self, console: Console, config: TrainConfig, recipe: str) -> None:
        self.console, self.config, self.recipe = console, config, recipe
        self.seconds = 0.0
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

    def __call__(self, step: Step) -> None:
        """Takes a finished step."""
        self.seconds += step.seconds
        if self.bar:
            self.bar.update(self.task, completed=step.number, text=self.text(step))
        elif step.number % max(1, self.config.steps // LINES) == 0 or step.number in (1, self.config.steps):
            self.console.print(
                f"{self.recipe}  {self.text(step)}", soft_wrap=True, highlight=False, markup=False
            )

    def text(self, step: Step) -> str:
        """The step as one line; the time left is that of the steps that remain at the mean pace so far."""
        rate = self.config.tokens_per_step / step.seconds
        left = self.seconds / step.number * (self.config.steps - step.number)
        return (
            f"step {step.number}/{self.config.steps}  loss {step.loss:.4f}  grad norm {step.grad_norm:.2f}  "
            f"{rate:,.0f} tokens/s  {left:.0f} s left"
        )
