"""A kernels module whose cases end the compiling process, as a crash of the compiler does."""

import os
import sys
from pathlib import Path

import check_kernels


def compile_cases(target):
    if Path(sys.argv[0]).stem == "worker":
        sys.stderr.write("LLVM ERROR: cannot select\n")
        sys.stderr.flush()
        os.abort()
    return [check_kernels.quantize_case(target), check_kernels.product_case(target, tile=(64, 32, 64))]
