"""A kernels module with a case that Triton refuses."""

import dataclasses

import check_kernels


def compile_cases(target):
    case = check_kernels.quantize_case(target)
    return [
        dataclasses.replace(
            case, configuration="no operation has a string", constexprs={**case.constexprs, "LIMIT": "many"}
        )
    ]
