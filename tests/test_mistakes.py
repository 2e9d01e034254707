"""docs/mistakes.md: what the author of a kernel is shown for each typical mistake, as it is printed today."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mistake_lab import MISTAKES, Mistake, make
from test_cli import Run, hfk

from hipfire_kernels.authoring.registry import REGISTRY, VARIABLE

__all__ = ["hfk"]

PAGE = Path(__file__).parent.parent / "docs" / "mistakes.md"


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a mistake's package registered is gone after its test."""
    monkeypatch.setenv(VARIABLE, "")
    known, taken = dict(REGISTRY._known), set(REGISTRY._taken)
    yield
    REGISTRY._known, REGISTRY._taken = known, taken
    sys.modules.pop("kernels", None)


def shown(run: Run, folder: Path) -> str:
    """The first line that says what is wrong, and of a compiler the first of its errors."""
    lines = f"{run.err}\n{run.out}".replace(f"{folder}/", "").splitlines()
    said = next(i for i, line in enumerate(lines) if line.startswith(("error: ", "FAILED ")))
    return "\n".join(lines[said : said + 1 + lines[said].endswith(":")])


def page() -> dict[str, str]:
    """Of each mistake what the page says is shown."""
    return dict(re.findall(r"\*\*(.+?)\*\*.*?```text\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name.replace(" ", "-"))
def test_what_is_shown(mistake: Mistake, tmp_path: Path, hfk: object) -> None:
    run = hfk("--families", str(make(mistake, tmp_path)), *mistake.command.split())  # type: ignore[operator]
    assert run.code != 0
    # Compilers name themselves, make two lines one in their own way, and round in their own way.
    varying = r"\S+ did not compile|thread \d+|\[[\d, ]+\]|or near .*?;|error [\d.e-]+ "
    assert re.sub(varying, "#", shown(run, tmp_path)) == re.sub(varying, "#", page()[mistake.name])


def test_the_page_has_them_all() -> None:
    assert list(page()) == [mistake.name for mistake in MISTAKES]
