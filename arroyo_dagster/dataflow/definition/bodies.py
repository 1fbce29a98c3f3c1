"""Inspect inline function bodies: their language, their function, and whether it fits its slot.

Python code is parsed but never run. For Rust, only the function's name and signature are read.

Source: sdf-states.md 3.1, 8.1 and 8.2; errors E25, E27, E38.
"""

from __future__ import annotations

import ast
import re
import warnings
import zlib
from dataclasses import dataclass

from arroyo_dagster.user_modules import parse_python

ARITIES: dict[str, tuple[int, ...]] = {
    "map": (1, 2),
    "filter": (1, 2),
    "filter-map": (1, 2),
    "flat-map": (1, 2),
    "assign-key": (1, 2),
    "assign-timestamp": (2, 3),
    "update-state": (1, 2),
    "flush": (0,),
}
"""The accepted numbers of arguments per operator: without and with a leading key argument."""

LANGUAGES = ("python", "rust", "sql")
_QUERIES = ("map", "filter", "assign-key", "update-state")
"""The operators that a query can serve."""

_PYTHON_START = re.compile(
    r"(?:async\s+)?def\b|import\b|from\b|@|'|\"|[A-Za-z_]\w*\s*(?::[^=\n]+)?=(?!=)"
)
_RUST_START = re.compile(
    r"(?:(?:async|unsafe|extern)\s+)*fn\b|pub\b|use\b|const\b|static\b|struct\b|enum\b|#!?\["
)
_SQL_START = re.compile(r"(?:select|with)\s", re.IGNORECASE)
_SKIPPED = re.compile(
    r"\s+|//[^\n]*|/\*.*?\*/|#(?!!?\[)[^\n]*|run:\s*\|[^\n]*", re.DOTALL
)  # a published example repeats `run: |` inside its body (spec 11.5)


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """The result of an inspection.

    Attributes:
        language: `python`, `rust` or `sql`; None if unknown.
        name: the name of the function; of a query one made from its text; None if it is unknown.
        errors: pairs of error number and message.
    """

    language: str | None
    name: str | None
    errors: tuple[tuple[str, str], ...] = ()


def inspect_body(source: str, language: str | None, operator: str) -> ParsedBody:
    """Inspect an inline body.

    Args:
        source: the code of the body.
        language: the value of `lang`; None = derive it from the first word of code.
        operator: the slot, a key of `ARITIES`.
    """
    start = 0
    while match := _SKIPPED.match(source, start):
        start = match.end()
    if language is None:
        language = "python" if _PYTHON_START.match(source, start) else None
        language = "rust" if _RUST_START.match(source, start) else language
        language = "sql" if _SQL_START.match(source, start) else language
    if language not in LANGUAGES:
        said = (
            ("the language is not given and cannot be derived")
            if language is None
            else f"unknown lang `{language}`"
        )
        return ParsedBody(
            None, None, (("E25", f"{said}; known languages: {', '.join(LANGUAGES)}"),)
        )
    if language == "sql":
        name = f"sql_{operator}_{zlib.crc32(source.encode()):08x}".replace("-", "_")
        if operator in _QUERIES:
            return ParsedBody("sql", name)
        said = f"a query cannot serve {operator}; expected one of {', '.join(_QUERIES)}"
        return ParsedBody("sql", name, (("E27", said),))
    return _python(source, operator) if language == "python" else _rust(source[start:], operator)


def _arity_error(operator: str, name: str, count: int) -> list[tuple[str, str]]:
    expected = ARITIES[operator]
    if count in expected:
        return []
    wanted = " or ".join(str(number) for number in expected)
    number = "E38" if operator == "flush" else "E27"
    return [(number, f"{operator} function `{name}` takes {count} arguments; expected {wanted}")]


# ---- Python --------------------------------------------------------------------------------------


def _python(source: str, operator: str) -> ParsedBody:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's code shows its warnings when it runs
            tree = parse_python(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        at = f" in line {error.lineno} of it" if isinstance(error, SyntaxError) else ""
        said = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        return ParsedBody("python", None, (("E27", f"the body does not parse: {said}{at}"),))
    others = [one for one in tree.body if not _may_precede(one)]
    functions = [one for one in others if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    if len(functions) != 1 or len(others) != 1:
        found = f"{len(functions)} functions"
        strange = [one for one in others if one not in functions]
        if strange:
            found += f", and another statement in line {strange[0].lineno} of it"
        said = f"expected imports, assignments and one `def`; found {found}"
        return ParsedBody("python", None, (("E27", said),))
    function = functions[0]
    return ParsedBody("python", function.name, tuple(_function_errors(function, operator)))


def _may_precede(statement: ast.stmt) -> bool:
    """Return whether a statement may stand beside the `def`: an import, an assignment, a text."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign)


def _function_errors(
    function: ast.FunctionDef | ast.AsyncFunctionDef, operator: str
) -> list[tuple[str, str]]:
    name, args = function.name, function.args
    if isinstance(function, ast.AsyncFunctionDef):
        return [("E27", f"function `{name}` is async; expected a plain `def`")]
    if args.vararg or args.kwarg or args.kwonlyargs:
        return [("E27", f"function `{name}` takes `*` arguments; expected positional ones only")]
    errors = _arity_error(operator, name, len(args.posonlyargs) + len(args.args))
    if operator != "flat-map" and _yields(function):
        errors.append(("E27", f"{operator} function `{name}` is a generator; return instead"))
    return errors


def _yields(function: ast.FunctionDef) -> bool:
    """Return whether the function itself yields; nested functions may."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))
    return False


# ---- Rust ----------------------------------------------------------------------------------------

_FN = re.compile(r"\bfn\s+([A-Za-z_][A-Za-z0-9_]*)\s*\(")
_SURE = re.compile(r"(?:String|bool|char|[iu](?:8|16|32|64|128|size)|f32|f64|\(\)|Vec<.*>)\Z", re.S)


def _rust(source: str, operator: str) -> ParsedBody:
    found = _FN.search(source)
    if found is None:
        return ParsedBody("rust", None, (("E27", "the body has no function `fn name(…)`"),))
    name = found.group(1)
    end = _closing(source, found.end())
    if end is None:
        return ParsedBody("rust", name, (("E27", f"the arguments of `{name}` do not end"),))
    arguments = [part for part in _split(source[found.end() : end]) if part.strip()]
    errors = _arity_error(operator, name, len(arguments))
    result = re.match(r"\s*->\s*([^{;]+)", source[end + 1 :])
    errors += _result_errors(operator, name, result.group(1).strip() if result else "")
    return ParsedBody("rust", name, tuple(errors))


def _closing(source: str, at: int) -> int | None:
    depth = 1
    for position in range(at, len(source)):
        depth += {"(": 1, ")": -1}.get(source[position], 0)
        if depth == 0:
            return position
    return None


def _result_errors(operator: str, name: str, result: str) -> list[tuple[str, str]]:
    """Return the errors of a result type. A name that may be a type alias is accepted."""
    inner = result
    if wrapped := re.fullmatch(r"(?:\w+::)*Result\s*<(.*)>", result, re.S):
        inner = _split(wrapped.group(1))[0].strip()
    said = f"{operator} function `{name}` returns `{inner or '()'}`"
    nothing = inner in ("", "()")
    if operator == "update-state":
        return [] if nothing else [("E38", f"{said}; expected nothing, `Result<()>`")]
    if nothing:
        return [("E38", f"{said}; expected a result")]
    if operator == "filter" and inner != "bool" and _SURE.match(inner):
        return [("E38", f"{said}; expected bool")]
    if operator == "filter-map" and _SURE.match(inner):
        return [("E38", f"{said}; expected an Option")]
    if operator == "assign-timestamp" and inner != "i64" and _SURE.match(inner):
        return [("E29", f"{said}; expected a signed 64-bit integer, i64")]
    if operator == "assign-key" and inner.startswith("Vec<"):
        return [("E28", f"{said}, which is not hashable; expected a bool, an integer or text")]
    return []


def _split(text: str) -> list[str]:
    """Return the parts of a list of types or parameters, between its commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"(": 1, "<": 1, "[": 1, ")": -1, ">": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
