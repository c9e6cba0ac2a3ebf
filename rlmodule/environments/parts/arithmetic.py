"""The tool of the calculator. Standard library only: children of a pool import this file by its path."""

import ast
import operator

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
}


def calc(x: str) -> str:
    """Work out an expression with numbers, + - * / // % and parentheses.

    Args:
        x: The expression, such as 2*(3+4).
    """
    return str(_value(ast.parse(x.strip(), mode="eval").body))


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))  # type: ignore[no-any-return]
    raise ValueError(f"{ast.unparse(node)} is no sum, product or number")
