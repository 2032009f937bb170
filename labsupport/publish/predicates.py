"""Predicates over records, as claims.toml writes them: "50e9 <= host_copy_bandwidth <= 100e9"."""

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

Values = Mapping[str, float]

_COMPARE = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {"min": min, "max": max, "abs": abs}
_ALLOWED = "only comparisons, and, or, not, + - * /, numbers, records, min, max, abs are known"


@dataclass(frozen=True)
class Predicate:
    """True or false of some values; `names` are those it uses."""

    names: frozenset[str]
    test: Callable[[Values], bool]


def parse_predicate(text: str, names: Collection[str]) -> Predicate:
    """The predicate of an expression over `names`.

    Nothing is given to `eval`: the syntax tree is turned into functions, and a node not known here has none.
    Raises ValueError for anything but comparisons of numbers, and for one that uses no name: nothing measured
    could change it.
    """
    try:
        body = ast.parse(text.strip(), mode="eval").body
        test = _truth(body, names)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"not an expression ({error})") from error
    used = frozenset(node.id for node in ast.walk(body) if isinstance(node, ast.Name)) & frozenset(names)
    if not used:
        raise ValueError("it uses no record, so nothing measured could change it")
    return Predicate(used, test)


def _truth(node: ast.expr, names: Collection[str]) -> Callable[[Values], bool]:
    match node:
        case ast.BoolOp(op=op, values=parts):
            truths = [_truth(part, names) for part in parts]
            joined = all if isinstance(op, ast.And) else any
            return lambda values: joined(truth(values) for truth in truths)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _truth(operand, names)
            return lambda values: not inner(values)
        case ast.Compare(left=left, ops=ops, comparators=right) if all(type(op) in _COMPARE for op in ops):
            terms = [_number(term, names) for term in (left, *right)]
            steps = list(zip([_COMPARE[type(op)] for op in ops], terms, terms[1:], strict=False))
            return lambda values: all(compare(low(values), high(values)) for compare, low, high in steps)
    raise ValueError(f"{ast.unparse(node)!r} is not a comparison; {_ALLOWED}")


def _number(node: ast.expr, names: Collection[str]) -> Callable[[Values], float]:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return lambda values: value
        case ast.Name(id=name) if name in names:
            return lambda values: values[name]
        case ast.Name(id=name):
            raise ValueError(f"{name!r} is not among the records ({', '.join(sorted(names)) or 'none'})")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _number(operand, names)
            return lambda values: -inner(values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            low, calculate, high = _number(left, names), _ARITHMETIC[type(op)], _number(right, names)
            return lambda values: calculate(low(values), high(values))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            if len(args) != 1 if name == "abs" else len(args) < 2:
                raise ValueError(f"{name} takes {'one number' if name == 'abs' else 'two numbers or more'}")
            function, terms = _FUNCTIONS[name], [_number(arg, names) for arg in args]
            return lambda values: function(*(term(values) for term in terms))
    raise ValueError(f"{ast.unparse(node)!r} is not a number; {_ALLOWED}")
