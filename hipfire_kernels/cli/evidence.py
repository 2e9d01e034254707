"""`hfk evidence`: the records that open routes on a card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hipfire_kernels.cli import _out

app = typer.Typer(help="The records that open routes on a card.")


@app.callback(invoke_without_command=True)
def summary(context: typer.Context, as_json: _out.Json = False) -> None:
    """The records that open routes on a card: those in force, and whether they still hold."""
    if context.invoked_subcommand is not None:
        return
    from hipfire_kernels.dispatch import evidence

    shown = [
        {
            "arch": r.arch,
            "route": r.route,
            "head_dim": r.shape.head_dim,
            "heads": f"{r.shape.n_heads}/{r.shape.n_kv_heads}",
            "kind": r.kind,
            "status": evidence.status(r),
            "verdict": "admitted" if r.verdict.admitted else "not admitted",
            "device": r.device or "",
            "source": r.source,
        }
        for r in evidence.current().values()
    ]
    if as_json:
        _out.document(shown)
        return
    columns = ["arch", "route", "head_dim", "heads", "kind", "status", "verdict", "device", "source"]
    _out.table(columns, [[record[column] for column in columns] for record in shown], numeric=["head_dim"])


@app.command()
def add(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of hfk firstlight.")],
    out: Annotated[Path | None, _out.new_file("[default: ARCH.json in the user's evidence folder]")] = None,
    not_a_card: Annotated[
        bool, typer.Option("--not-a-card", help="Take a stand-in's records too; they are marked as such.")
    ] = False,
    as_json: _out.Json = False,
) -> None:
    """Check the folder of a first run, and have its records open routes. Exit code 3: refused, with all reasons."""
    from hipfire_kernels.dispatch import submitted

    records, file = submitted.add(folder, out, not_a_card=not_a_card)
    if as_json:
        _out.document({"out": str(file), "records": [r.as_dict() for r in records]})
        return
    for r in records:
        verdict = "opens" if r.verdict.admitted else "stays closed"
        print(f"{r.arch} {r.route} d{r.shape.head_dim}: {verdict}, {r.verdict.why}")
    print(f"{len(records)} records of {records[0].device} in {file}")
