"""The command line, `hfk`. A command reads its options, calls the library and prints what it got."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hipfire_kernels import __version__
from hipfire_kernels.cli import (
    _ending,
    _errors,
    _families,
    _out,
    ab,
    bench,
    bundle,
    cache,
    convert,
    diff,
    doctor,
    evidence,
    explain,
    firstlight,
    fuzz,
    generate,
    isa,
    kernels,
    lint,
    parity,
    qualify,
    report,
    sanitize,
    tune,
    watch,
)
from hipfire_kernels.errors import HipfireError


class _Commands(TyperGroup):
    """All commands, with the one place where an error becomes a message and an exit code."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run a command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            _ending.say_interrupted()
            raise typer.Exit(_ending.INTERRUPTED) from error
        except (HipfireError, OSError) as error:
            if _ending.untaken() is not None:  # which the end says
                raise typer.Exit(_errors.FAILED) from error
            _errors.report(error, as_json=_out.json_asked(ctx))
            raise typer.Exit(_errors.exit_code(error)) from error


app = typer.Typer(
    name="hfk",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:
    if value:
        print(f"hipfire-kernels {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version)
    ] = False,
    families: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE,...",
            help="Modules, or .py files, with kernel families of your own; the current folder is looked in too.",
        ),
    ] = None,
) -> None:
    """Author, build, verify and run speculative-verify attention kernels; no GPU required.

    Exit codes: 0 done, 1 the check failed, 2 wrong usage or input, 3 refused (not admitted, not available),
    130 interrupted.
    """
    if families:
        _families.use([name for text in families for name in text.split(",") if name])


app.command()(generate.demo)
app.command()(generate.generate)
app.command()(convert.convert)
app.command("list")(kernels.list_)
app.command()(kernels.render)
app.command()(kernels.build)
app.command()(bundle.bundle)
app.command()(isa.isa)
app.command()(diff.diff)
app.command()(watch.watch)
app.command()(lint.lint)
app.command()(sanitize.sanitize)
app.command()(parity.parity)
app.command()(fuzz.fuzz)
app.command()(fuzz.replay)
app.command()(bench.bench)
app.command()(ab.ab)
app.command()(firstlight.firstlight)
app.add_typer(evidence.app, name="evidence")
app.command()(qualify.qualify)
app.command()(tune.tune)
app.command()(report.report)
app.command()(explain.explain)
app.add_typer(cache.app, name="cache")
app.command()(doctor.doctor)


def main() -> None:
    """The entry point of `hfk`."""
    _ending.run(_logged)


def _logged() -> None:
    shown = logging.StreamHandler(sys.stderr)
    shown.setLevel(logging.WARNING)
    logging.basicConfig(format="%(levelname)s: %(message)s", handlers=[shown])
    app()
