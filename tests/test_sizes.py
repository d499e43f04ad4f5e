"""How long a file and a function may be, and how many arguments a call must give."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "deploy", "examples", "kernels", "service", "src", "tests", "worker")
FILE_LINES = 300
FUNCTION_LINES = 40  # of its statements: options of a command, each with its help, are no code
ARGUMENTS = 6  # without a default, self and cls apart

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(folder: str) -> list[Path]:
    found = [file for file in (ROOT / folder).rglob("*.py") if not file.is_symlink()]
    assert found, f"no code in {folder}"
    return found


def functions(folder: str) -> Iterator[tuple[str, Function]]:
    for file in python_files(folder):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, Function) and not is_device_code(node):
                yield f"{file.relative_to(ROOT)}:{node.lineno} {node.name}", node


def is_device_code(function: Function) -> bool:
    """A kernel is one function to its compiler, and its arguments are the launch's."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def statement_lines(function: Function) -> int:
    first, *others = function.body
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    if is_docstring and not others:
        return 0
    start = others[0] if is_docstring else first
    return (function.end_lineno or 0) - start.lineno + 1


def needed_arguments(function: Function) -> int:
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    needed = positional[: len(positional) - len(given.defaults)]
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    needed += [argument for argument, default in pairs if default is None]
    return len([argument for argument in needed if argument.arg not in ("self", "cls")])


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_file_is_read_in_one_sitting(folder: str) -> None:
    lengths = {file: len(file.read_text("utf-8").splitlines()) for file in python_files(folder)}
    assert {file: lines for file, lines in lengths.items() if lines > FILE_LINES} == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_function_fits_on_a_screen(folder: str) -> None:
    lengths = {name: statement_lines(function) for name, function in functions(folder)}
    assert {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES} == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_call_gives_few_arguments(folder: str) -> None:
    numbers = {name: needed_arguments(function) for name, function in functions(folder)}
    assert {name: number for name, number in numbers.items() if number > ARGUMENTS} == {}
