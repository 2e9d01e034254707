"""One self-contained page of a run: what was found, step by step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined

from hipfire_kernels import __version__
from hipfire_kernels.bench.firstlight.runner import GOOD
from hipfire_kernels.bench.firstlight.steps import Step
from hipfire_kernels.dispatch.runfolder import ABSENT, PASSED, SKIPPED, STATES, Result

_TONES = {PASSED: "good", ABSENT: "quiet", SKIPPED: "quiet"}
_MOST = 200_000
"""Characters of figures that a page shows of a step; the folder has all."""


def page(summary: dict[str, Any], done: Sequence[tuple[Step, Result]], left: Sequence[Step], stopped: str) -> str:
    """The page, as text.

    Args:
        done: what has come to something.
        left: steps that have not been run.
        stopped: why the run stopped before its end; empty where it did not.
    """
    template = resources.files("hipfire_kernels.bench.firstlight") / "page.html.j2"
    environment = Environment(undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        summary=summary,
        device={"name": "", "arch": "", "kind": "", **summary["device"]},
        counts=_counts(done),
        wrong=[(step, result) for step, result in done if result.state not in (*GOOD, SKIPPED)],
        steps=[(step, result, _TONES.get(result.state, "bad"), _figures(result)) for step, result in done],
        left=left,
        stopped=stopped,
        states=STATES,
        version=__version__,
    )


def _counts(done: Sequence[tuple[Step, Result]]) -> list[tuple[str, int]]:
    """How many steps came to what, in the order of the states."""
    states = [result.state for _, result in done]
    return [(state, states.count(state)) for state in STATES if state in states]


def _figures(result: Result) -> str:
    if not result.facts:
        return ""
    text = json.dumps(result.facts, indent=1)
    return text if len(text) <= _MOST else f"{text[:_MOST]}\n... the folder has all"
