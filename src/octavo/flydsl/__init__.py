"""Kernels in FlyDSL for gfx950, an optional second provider (`pip install 'octavo[flydsl]'`).

FlyDSL (Apache-2.0, ROCm) is AMD's Python language for kernels with explicit layouts. None of these kernels was timed
on a GPU, so none is chosen by itself. `octavo check --target gfx950` compiles and inspects them without a GPU, and
the executor runs them on the CPU. Importing this package imports no FlyDSL; `octavo.hardware.why_no_flydsl` says in
one line why it cannot be used.
"""
