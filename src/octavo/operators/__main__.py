"""``python -m octavo.operators script.py arguments``: a program that cannot be edited, with operators switched on."""

from __future__ import annotations

import sys

from octavo.operators.registry import ENVIRONMENT
from octavo.operators.script import run_script


def main() -> None:
    """Run the script named by the first argument with the others as its own."""
    if len(sys.argv) < 2:
        sys.exit(f"usage: [{ENVIRONMENT}=topk,rms_norm] python -m octavo.operators script.py arguments")
    run_script(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
