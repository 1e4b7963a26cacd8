"""A whole serve-bench: models, checks, timings, files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from octavo.bench.serving import contenders as serving_contenders
from octavo.bench.serving import models, report
from octavo.bench.serving.contenders import FORMATS, OCTAVO, Contender
from octavo.bench.serving.measure import Check, Load, Timing, check, measure
from octavo.errors import UserError
from octavo.serving.schemes import ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class Job:
    """What ``octavo serve-bench`` was asked for; see its options."""

    model: str
    formats: tuple[str, ...]
    concurrency: tuple[int, ...]
    isl: int
    osl: int
    rounds: int
    activations: str | None
    layers: int | None
    device: str | None
    graphs: bool
    force: bool
    out: Path

    def check(self) -> torch.device:
        """The device to serve on.

        Raises:
            UserError: an option that cannot work.
        """
        unknown = [form for form in self.formats if form not in FORMATS]
        if unknown or not self.formats:
            got = repr(unknown[0]) if unknown else "empty"
            raise UserError(f"--format is {got}: choose from {', '.join(FORMATS)}")
        if not self.concurrency or self.concurrency[0] < 1:
            raise UserError("--concurrency needs at least one number, each at least 1, as 1,8,32")
        for name in ("isl", "osl", "rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} is {getattr(self, name)}: give at least 1")
        if self.activations is not None and self.activations not in ACTIVATIONS:
            raise UserError(f"--activations is {self.activations!r}: choose from {', '.join(ACTIVATIONS)}")
        try:
            device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        except RuntimeError:
            raise UserError(f"--device is {self.device!r}: give cpu, cuda or cuda:N") from None
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UserError(f"--device is {self.device!r} but PyTorch sees no GPU here: use --device cpu")
        return device


def run(job: Job, console: Console, command: str) -> bool:
    """Serves, prints, writes; whether every check passed.

    Raises:
        UserError: an option that cannot work, no memory, or a file that cannot be written.
    """
    device = job.check()
    served = models.find(job.model, job.layers)
    try:
        standing = list(_contenders(job, served, device))
    except torch.OutOfMemoryError:
        raise UserError(
            f"out of memory while {served.name} was made: give a smaller model, fewer --layers or one --format"
        ) from None
    loads = [Load(c, job.isl, job.osl, job.rounds) for c in job.concurrency]
    checks = _checks(standing, loads[0], served.vocabulary)
    timings: list[Timing] = []
    for load in loads:
        timings += measure(standing, load, served.vocabulary, graphs=job.graphs)
        data = report.as_data(served.name, command, device, checks, timings)
        try:
            written = report.write(data, job.out)
        except OSError as error:
            raise UserError(f"--out {str(job.out)!r} cannot be written: {error.strerror or error}") from None
    console.print(report.markdown(data), soft_wrap=True, highlight=False, markup=False)
    console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True, highlight=False, markup=False)
    return all(found.passed for found in checks.values())


def _contenders(job: Job, served: models.Served, device: torch.device) -> Iterator[Contender]:
    """Stock first, then for each format Octavo and, where weights are quantized, decoding them first."""
    room = job.isl + job.osl

    def fresh() -> torch.nn.Module:
        return served.build(torch.bfloat16, device, room)

    yield serving_contenders.stock(fresh())
    for form in job.formats:
        ours = serving_contenders.octavo(fresh(), form, activations=job.activations, force=job.force)
        yield ours
        if form != "bf16":
            yield serving_contenders.decoded_first(ours)


def _checks(standing: list[Contender], load: Load, vocabulary: int) -> dict[str, Check]:
    """Octavo's contenders against the same quantized operands in float32 products, or the stock model."""
    stock, checks = standing[0], {}
    for contender in standing:
        if contender.name == OCTAVO:
            against = stock if contender.format == "bf16" else serving_contenders.reference(contender)
            checks[f"{contender.format} {OCTAVO}"] = check(contender, against, load, vocabulary)
    return checks
