"""Which folder may import what."""

import ast
from graphlib import TopologicalSorter
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
    found = list((ROOT / folder.replace(".", "/")).rglob("*.py"))
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


@pytest.mark.parametrize("package", ["service.batching", "service.calls"])
def test_folders_of_a_package_import_without_a_circle(package: str) -> None:
    """What lies beside the folders is for all, or puts them together."""
    prefix = f"stemserve.{package}."
    folder_of = {
        prefix + ".".join(file.with_suffix("").parts): file.parts[0]
        for file in (f.relative_to(ROOT / package.replace(".", "/")) for f in files(package))
        if len(file.parts) > 1
    }
    imports: dict[str, set[str]] = {folder: set() for folder in folder_of.values()}
    for module, folder in folder_of.items():
        names = imported_modules(ROOT / f"{module.removeprefix('stemserve.').replace('.', '/')}.py")
        imports[folder] |= {folder_of[name] for name in names if name in folder_of} - {folder}
    assert len(imports) > 3
    assert list(TopologicalSorter(imports).static_order())
