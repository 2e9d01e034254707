"""`hfk cache`: the compiled kernels on disk."""

from __future__ import annotations

from typing import Any

import typer

from hipfire_kernels.cli import _out
from hipfire_kernels.cli._errors import FAILED, refuse

app = typer.Typer(help="The compiled kernels on disk.")


@app.callback(invoke_without_command=True)
def summary(context: typer.Context, as_json: _out.Json = False) -> None:
    """The compiled kernels on disk: how many, how large, where."""
    from hipfire_kernels.building.cache import default_cache
    from hipfire_kernels.building.storage import folder_bytes

    if context.invoked_subcommand is not None:
        return
    cache = default_cache()
    count, size = sum(1 for _ in cache.entries()), folder_bytes(cache.path)
    if as_json:
        _out.document({"path": str(cache.path), "kernels": count, "bytes": size})
    else:
        print(f"{count} kernels, {size / 1e6:.1f} MB in {cache.path}; `hfk cache --help` says what can be done")


@app.command("ls")
def list_(as_json: _out.Json = False) -> None:
    """List the cached kernels."""
    from hipfire_kernels.building.cache import Entry, default_cache

    def described(e: Entry) -> dict[str, Any]:
        names = ("entry", "arch", "toolchain", "compiler", "created", "key", "resources")
        return {**{name: getattr(e, name) for name in names}, "code_bytes": len(e.code)}

    shown = [described(e) for e in default_cache().entries()]
    if as_json:
        _out.document(shown)
        return
    columns = ["entry", "arch", "toolchain", "code_bytes", "created", "key"]
    _out.table(columns, sorted([e[c] for c in columns] for e in shown), numeric=["code_bytes"])
    print(f"{len(shown)} kernels in {default_cache().path}")


@app.command()
def verify(as_json: _out.Json = False) -> None:
    """Read every entry in full. Exit code 1 if one is not sound; it is compiled anew when next needed."""
    from hipfire_kernels.building.cache import default_cache

    cache = default_cache()
    findings = cache.verify()
    if as_json:
        unsound = [{"path": str(f.path), "reason": f.reason} for f in findings]
        _out.document({"path": str(cache.path), "unsound": unsound})
    else:
        for finding in findings:
            print(f"{finding.path} {finding.reason}")
        print(f"{len(findings)} unsound entries in {cache.path}")
    if findings:
        raise typer.Exit(FAILED)


@app.command()
def clear(as_json: _out.Json = False) -> None:
    """Remove what the library has cached."""
    from hipfire_kernels.building.cache import default_cache

    cache = default_cache()
    try:
        removed = cache.clear()
    except OSError as error:
        raise refuse(f"error: the cache cannot be cleared ({error})") from error
    if as_json:
        _out.document({"path": str(cache.path), "removed": removed})
    else:
        print(f"removed {removed} kernels from {cache.path}")


@app.command()
def path(as_json: _out.Json = False) -> None:
    """Print the cache folder. HIPFIRE_CACHE_DIR moves it."""
    from hipfire_kernels.building.storage import cache_root

    if as_json:
        _out.document({"path": str(cache_root())})
    else:
        print(cache_root())
