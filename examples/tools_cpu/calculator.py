"""The tool of the example: a plain Python function. Its signature and docstring describe it to the policy."""

from __future__ import annotations

import ast
import operator

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression of whole numbers.

    Args:
        expression: the expression, e.g. "12*(3+4)"
    """
    return str(_value(ast.parse(expression, mode="eval").body))


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return int(OPERATORS[type(sign)](_value(left), _value(right)))
    raise ValueError("give whole numbers with + - * // and brackets")
