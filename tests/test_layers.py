"""Which folder may import what."""

import ast
from pathlib import Path

import pytest

import stemserve

OURS = {
    "proto": set[str](),
    "kernels": set[str](),
    "service": {"proto", "json_log", "leaving", "step_link"},
    "worker": {"proto", "kernels", "json_log", "leaving", "step_link"},
}
FORBIDDEN = {
    "proto": {"torch", "numpy"},
    "kernels": {"grpc", "google"},
    "service": {"torch", "triton", "flashinfer", "transformers"},
    "worker": set[str](),
}
ROOT = Path(stemserve.__file__).parent


def imported_modules(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text("utf-8"))))
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "stemserve":
            names |= {f"stemserve.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def files(folder: str) -> list[Path]:
    found = list((ROOT / folder).rglob("*.py"))
    assert found, f"no code in {folder}"
    return found


@pytest.mark.parametrize("folder", OURS)
def test_folder_imports_only_what_it_may_of_ours(folder: str) -> None:
    for file in files(folder):
        ours = {name for name in imported_modules(file) if name.startswith("stemserve.")}
        folders = {name.split(".")[1] for name in ours}
        assert folders <= OURS[folder] | {folder}, file


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_folder_imports_no_library_of_another_layer(folder: str) -> None:
    for file in files(folder):
        top = {name.split(".")[0] for name in imported_modules(file)}
        assert not top & FORBIDDEN[folder], file
