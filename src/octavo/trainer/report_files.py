"""The files of a report: the data, the page, the text and the picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from octavo.trainer import plot, report, report_html, report_markdown

NAMES = ("report.json", "report.html", "report.md", "loss.png")


def write(data: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the report ``data`` into ``folder``; returns the files, in the order of ``NAMES``.

    The data come first, so that they are there when a picture or a page cannot be written.

    Raises:
        OSError: a file cannot be written; those before it are.
    """
    data_file, page, text, picture = (folder / name for name in NAMES)
    report.write_json(data, data_file)
    _write_text(report_html.render(data), page)
    _write_text(report_markdown.render(data, picture.name), text)
    plot.write_png(data, picture)
    return [data_file, page, text, picture]


def _write_text(content: str, path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(content, encoding="utf-8")
    os.replace(partial, path)
