"""Small faults put into a module's source, one at a time, each as a splice of its text."""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_PAIRS = (("min", "max"), ("amin", "amax"), ("argmin", "argmax"), ("minimum", "maximum"), ("any", "all"))
_NAMES = {name: other for pair in _PAIRS for name, other in (pair, pair[::-1])}


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        where: Class and function that it is in.
        was: The lines that it changes, without indentation.
        now: The same lines with the fault.
        source: The whole module with the fault.
    """

    where: str
    was: str
    now: str
    source: str


def mutants(source: str) -> Iterator[Mutant]:
    """Every fault of a module; like ones in one function are numbered, so that no two are described alike."""
    lines = source.splitlines(keepends=True)
    seen: Counter[tuple[str, str, str]] = Counter()
    for node, where, text in _faults(ast.parse(source)):
        first, last = node.lineno - 1, node.end_lineno
        touched = "".join(lines[first:last])
        # Columns count bytes.
        raw, before = touched.encode(), len("".join(lines[first : last - 1]).encode())
        changed = (raw[: node.col_offset] + text.encode() + raw[before + node.end_col_offset :]).decode()
        described = where, _plain(touched), _plain(changed)
        seen[described] += 1
        number = f" (number {seen[described]})" if seen[described] > 1 else ""
        yield Mutant(where + number, *described[1:], "".join(lines[:first]) + changed + "".join(lines[last:]))


def _plain(lines: str) -> str:
    return " ".join(line.strip() for line in lines.splitlines())


def _faults(tree: ast.Module) -> Iterator[tuple[ast.AST, str, str]]:
    """Nodes, where they are, and what to put in their place."""
    for node, where in _code(tree, ""):
        for text in _statement(node) if isinstance(node, ast.stmt) else _expression(node):
            yield node, where, text
        for child in _conditions(node):
            yield child, where, "True"
            yield child, where, "False"
        for child, text in _bounds(node):
            yield child, where, text


def _code(node: ast.AST, where: str) -> Iterator[tuple[ast.AST, str]]:
    """All nodes that compute something: no docstrings, annotations, decorators, or messages."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "ctx", "exc", "cause"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, (ast.JoinedStr, ast.Import, ast.ImportFrom)):
                continue
            inside = where
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inside = f"{where}.{child.name}".lstrip(".")
            yield child, inside
            yield from _code(child, inside)


def _statement(node: ast.stmt) -> Iterator[str]:
    """A statement left out; names stay bound, since what is never bound is found at once."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    if (
        (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant))
        or isinstance(node, (ast.Raise, ast.AugAssign, ast.Continue, ast.Break))
        or (targets and not any(isinstance(target, (ast.Name, ast.Tuple)) for target in targets))
    ):
        yield "pass"
    if isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
        yield ast.unparse(ast.AugAssign(node.target, _OPERATORS[type(node.op)](), node.value))


def _expression(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)):
            yield str({0: 1, 1: 0}.get(value, value + 1))
        case ast.Constant(value=float(value)):
            yield str(2 * value or 1.0)
        case ast.Compare(ops=[op]):
            yield _written(ast.Compare(node.left, [_OPERATORS[type(op)]()], node.comparators))
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            yield _written(ast.BinOp(node.left, _OPERATORS[type(op)](), node.right))
        case ast.BoolOp(op=op):
            yield _written(ast.BoolOp(_OPERATORS[type(op)](), node.values))
        case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub()):
            yield _written(node.operand)
        case ast.Call():
            yield from _call(node)
        case ast.keyword(arg=str(name)) if name in _NAMES:
            yield f"{_NAMES[name]}={ast.unparse(node.value)}"


def _call(node: ast.Call) -> Iterator[str]:
    match node.func:
        case ast.Attribute(attr="clone", value=value):
            yield _written(value)
        case ast.Name(id=name) if name in _NAMES:
            yield _written(ast.Call(ast.Name(_NAMES[name]), node.args, node.keywords))
        case ast.Attribute(attr=name, value=value) if name in _NAMES:
            yield _written(ast.Call(ast.Attribute(value, _NAMES[name]), node.args, node.keywords))


def _conditions(node: ast.AST) -> list[ast.expr]:
    """What is to be taken for true and for false; `while True` would never end."""
    if isinstance(node, (ast.If, ast.IfExp)):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else []


def _bounds(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Slices that begin one later or end one earlier."""
    match node:
        case ast.Slice(lower=lower, upper=upper):
            pass
        case ast.Call(func=ast.Name(id="slice"), args=[lower, upper]):
            pass
        case _:
            return
    if lower is not None:
        yield lower, _written(ast.BinOp(lower, ast.Add(), ast.Constant(1)))
    if upper is not None:
        yield upper, _written(ast.BinOp(upper, ast.Sub(), ast.Constant(1)))


def _written(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"
