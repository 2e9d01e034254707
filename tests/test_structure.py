"""The architecture, held: imports point one way, importing is light, names are not written twice."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

import hipfire_kernels as hk

ROOT = Path(__file__).parent.parent
LAYERS = {"core": 0, "dispatch": 1, "model": 2, "bench": 3, "cli": 4}


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else "core"


FOLDERS = {"hipfire_kernels": "", "dispatch": ".dispatch", "model": ".model", "bench": ".bench"}


def modules() -> Iterator[tuple[str, Path]]:
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT / folder).with_suffix("").parts)
            yield f"hipfire_kernels{package}.{name}".removesuffix(".__init__"), path


def imported(module: str, path: Path) -> Iterator[str]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def test_imports_point_one_way() -> None:
    """model -> dispatch -> core. The package's own __init__ lends its callers a few names of dispatch, at first use."""
    for module, path in modules():
        if module == "hipfire_kernels":
            continue
        for name in imported(module, path):
            if name.startswith("hipfire_kernels"):
                assert LAYERS[layer(name)] <= LAYERS[layer(module)], f"{module} imports {name}"


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, by whatever detour: strongly connected components of two and more."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        ahead = [start]
        while ahead:
            for name in imports[ahead.pop()] - found:
                found.add(name)
                ahead.append(name)
        return found

    reach = {name: reached(name) for name in imports}
    rings = {tuple(sorted({name, *(b for b in reach[name] if name in reach[b])})) for name in imports}
    return [list(ring) for ring in sorted(rings) if len(ring) > 1]


def test_circles_are_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_no_import_circles() -> None:
    """Imports at first use and those for type checkers count: a circle that is broken by them is still one."""
    known = dict(modules())
    imports: dict[str, set[str]] = {}
    for module, path in known.items():
        # The package's own __init__ lends names of rooms that are imported at first use: no edge of a module.
        names = set() if module == "hipfire_kernels" else set(imported(module, path))
        imports[module] = {n if n in known else n.rpartition(".")[0] for n in names} & set(known) - {module}
    assert circles(imports) == []


def test_the_root_holds_what_belongs_to_no_room() -> None:
    assert len(list((ROOT / "hipfire_kernels").glob("*.py"))) <= 12


def test_the_links_make_the_folders_one_package() -> None:
    for name in ("bench", "dispatch", "model", "templates"):
        link = ROOT / "hipfire_kernels" / name
        assert link.is_symlink(), f"{link} is no link; git must check out symbolic links (core.symlinks)"
        assert link.readlink() == Path("..") / name


def test_importing_needs_numpy_and_jinja2_alone() -> None:
    program = """
import json, sys, time
start = time.perf_counter()
import hipfire_kernels
families = len(hipfire_kernels.families())
print(json.dumps({"seconds": time.perf_counter() - start, "modules": sorted({m.split(".")[0] for m in sys.modules})}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    heavy = {
        "cffi",
        "hip",
        "rocm",
        "cuda",
        "typer",
        "rich",
        "platformdirs",
        "elftools",
        "msgpack",
        "tokenizers",
        "torch",
    }
    assert not heavy & set(report["modules"])


def test_public_names_exist() -> None:
    for name in hk.__all__:
        assert getattr(hk, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = hk.nonsense


def test_every_template_belongs_to_a_family_or_is_included() -> None:
    folder = resources.files("hipfire_kernels.templates")
    names = {f.name for f in folder.iterdir() if f.name.endswith((".h", ".j2"))}
    text = "".join((folder / n).read_text(encoding="utf-8") for n in names)
    from hipfire_kernels.archs import ARCHS
    from hipfire_kernels.authoring.render import _DIALECT_PARTS
    from hipfire_kernels.checking.matrix_probe import PROBE
    from hipfire_kernels.running.timing import READ

    used = {f.origin.name for f in hk.families().values()} | {p for parts in _DIALECT_PARTS.values() for p in parts}
    used |= {f"matrix_{arch.dialect}.h" for arch in ARCHS.values()}
    used |= {READ.origin.name, PROBE.origin.name, "host_entry.h.j2"} | {n for n in names if f'include "{n}"' in text}
    assert names == used


def test_variants_name_their_legal_values() -> None:
    rows = hk.families()["attention_flash_q8_0_rows"]
    assert rows.variant(rows=8, head_dim=256).entry == "attention_flash_q8_0_rows8_d8"
    with pytest.raises(ValueError, match="rows=5 is not declared; legal values: 4, 8"):
        rows.variant(rows=5, head_dim=256)
    with pytest.raises(ValueError, match="needs head_dim=, one of 128, 256"):
        rows.variant(rows=8)
    with pytest.raises(ValueError, match="no parameter 'tile'"):
        rows.variant(rows=8, head_dim=256, tile=64)


def test_entry_points_are_unique() -> None:
    names = [v.entry for f in hk.families().values() for v in f.variants()]
    assert len(names) == len(set(names))


def test_unknown_archs_are_refused() -> None:
    variant = hk.families()["attention_flash_q8_0_rows"].variant(rows=8, head_dim=256)
    for name in ("gfx90a", "GFX1100", "gfx11-generic", ""):
        with pytest.raises(hk.InputError, match=r"is not known; known archs: gfx1100"):
            variant.source(name)
    assert variant.source("gfx1100:sramecc-:xnack-") == variant.source("gfx1100")
