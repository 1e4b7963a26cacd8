"""A report as one HTML file that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import functools
from typing import Any

import jinja2

from octavo.trainer import report_charts as charts
from octavo.trainer import report_view as view

HUES = 8
"""Colours of curves; where there are more runs, the next ones are dashed."""


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("octavo.trainer", "templates"),
        autoescape=True,  # names and paths come from the user
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html.jinja")


def _classes(style: str) -> str:
    """CSS classes of a curve or bar: its colour, and its dash from the ninth run on."""
    if style == "base":
        return "base"
    number = int(style)
    return f"hue{number % HUES}" + (f" dash{min(number // HUES, 2)}" if number >= HUES else "")


def render(data: dict[str, Any]) -> str:
    """The page of the report ``data``; the same data give the same text.

    Args:
        data: what :func:`octavo.trainer.report.as_data` or :func:`octavo.trainer.report_merge.merge` gave, or
            such a ``report.json``.
    """
    names, rows = view.differing(data)
    return _template().render(
        data=data,
        title=view.title(data),
        unit=view.unit(data),
        columns=view.columns(data),
        failures=view.failures(data),
        failed={name for name, _ in view.failures(data)},
        styles={name: _classes(style) for name, style in charts.styles(data).items()},
        classes=_classes,
        loss_charts=charts.loss_charts(data),
        bars=charts.bars(data),
        sqnr_charts=charts.sqnr_charts(data),
        heats=view.heats(data),
        tensors=view.TENSORS,
        settings=view.settings(data),
        job_names=names,
        differing=rows,
        jobs=view.jobs(data),
        harmless=view.HARMLESS,
        absent=view.NONE,
    )
