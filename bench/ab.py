"""A/B runs: is `on` faster than `off`, when exactly one thing differs between them?

Every sample is a fresh process, in the order that `pairs` declares before the first one runs. What a sample ran on
(code, environment, machine, inputs) must be the same in all of them, and what it produced the same in both arms, before
any time is looked at; a run in which something differs, or which is traced, ends without a number. `ab_arms` has the
experiments on attention and on requests, `ab_cases` that on any kernel with a reference, `ab_card` the runs that are
shown of a card.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hipfire_kernels import __version__, errors
from hipfire_kernels.bench import pairs
from hipfire_kernels.bench.pairs import ANCHOR, OFF, ON
from hipfire_kernels.errors import DeviceError, HipfireError

SCHEMA = 1
REPEATS = 6
"""Of the declared order by default: 18 pairs, of which one may disagree."""

LIMIT_S = 900
"""Seconds after which a sample is taken for hung."""

_SAME = ("code", "records", "environment", "machine")
_START = "import sys; sys.path[:] = sys.argv[1:]; from hipfire_kernels.bench import _ab_child; _ab_child.main()"
"""The child finds its modules where this process does, whatever the working folder holds."""

Sample = dict[str, Any]
Taken = Sequence[tuple[str, Sample]]
OnStep = Callable[[str], None]


def first_of(taken: Taken, arm: str) -> Sample | None:
    """The first sample of an arm, if there is one yet."""
    return next((sample for name, sample in taken if name == arm), None)


@dataclass(frozen=True)
class Arm:
    """What the processes of one arm are told.

    Attributes:
        shown: the value of the one variable.
        job: for `_ab_child`.
        environ: variables that the arm sets, or with None unsets.
        differing: those of them that differ between the arms.
    """

    shown: str
    job: Mapping[str, Any]
    environ: Mapping[str, str | None] = field(default_factory=dict)
    differing: tuple[str, ...] = ()


class Experiment(Protocol):
    """Two arms and an anchor.

    Attributes:
        mode: "kernel", "case" or "generate".
        variable: the one thing that differs.
        unit: of a sample's value.
        device: where it runs.
    """

    mode: str
    variable: str
    unit: str
    device: str

    def arms(self) -> contextlib.AbstractContextManager[Mapping[str, Arm]]:
        """The arms by name; temporary files live as long as the block."""

    def pinned(self) -> dict[str, Any]:
        """What the run is bound to besides code, environment and machine; the same whenever it is asked for."""

    def unequal(self, taken: Taken) -> str:
        """What the last sample produced differently from those before it; empty when nothing."""

    def facts(self, taken: Taken) -> dict[str, Any]:
        """What was found equal, and how each arm ran, for the document."""

    def per_row(self, arm: str) -> float:
        """What divides a value of this arm for the comparison with the anchor."""


def run(experiment: Experiment, repeats: int = REPEATS, step: OnStep = lambda what: None) -> dict[str, Any]:
    """Take all samples, and judge them.

    Args:
        repeats: of the declared order; see `pairs.order`.
        step: called after each sample.

    Returns:
        The document: `judgement` has the verdict; None where `refused` or `traced` says why there are no numbers.

    Raises:
        HipfireError: of the kind that a sample ended with, or the sample's process crashed or hung.
    """
    declared = pairs.order(repeats)
    pinned = experiment.pinned()
    taken: list[tuple[str, Sample]] = []
    refused = ""
    with experiment.arms() as arms:
        for number, arm in enumerate(declared):
            taken.append((arm, _sample(arms[arm], f"sample {number + 1} ({arm})")))
            step(arm)
            refused = _changed(taken) or experiment.unequal(taken)
            if refused or (taken[-1][1]["traced"] and {a for a, _ in taken} == set(arms)):
                break
        shown = {name: arm.shown for name, arm in arms.items()}
    if not refused and experiment.pinned() != pinned:
        refused = "an input has changed on disk while it was measured"
    first = taken[0][1]
    document: dict[str, Any] = {
        "kind": "ab",
        "schema": SCHEMA,
        "mode": experiment.mode,
        "variable": experiment.variable,
        "arms": shown,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "pinned": {**{n: first[n] for n in _SAME}, "version": __version__, **pinned},
        "order": list(declared),
        "refused": refused or None,
        "traced": next((s["traced"] for _, s in taken if s["traced"]), None),
        "equal": None if refused else experiment.facts(taken),
        "unit": experiment.unit,
        "samples": [],
        "ratios": [],
        "judgement": None,
        "anchor": None,
    }
    if not document["refused"] and not document["traced"]:
        document |= _numbers(experiment, taken)
    return document


def _sample(arm: Arm, name: str) -> Sample:
    """Run one process. Raises what it ended with."""
    environ = {**os.environ, "PYTHONHASHSEED": "0", **{n: t for n, t in arm.environ.items() if t is not None}}
    for variable, text in arm.environ.items():
        if text is None:
            environ.pop(variable, None)
    job = json.dumps({**arm.job, "but": list(arm.differing)})
    argv = [sys.executable, "-c", _START, *sys.path]
    try:
        done = subprocess.run(argv, input=job, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise DeviceError(f"{name} did not end within {LIMIT_S} s; it was killed") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = "\n".join(done.stderr.splitlines()[-15:])
        raise HipfireError(f"{name} ended with status {done.returncode} and no result:\n{said}")
    found: Sample = json.loads(lines[-1])
    if "error" in found:
        kind = getattr(errors, found["error"]["kind"], HipfireError)
        raise kind(f"{name}: {found['error']['message']}")
    return found


def _changed(taken: Sequence[tuple[str, Sample]]) -> str:
    """What the last sample ran on that the first did not."""
    first, (arm, last) = taken[0][1], taken[-1]
    for name in _SAME:
        if last[name] != first[name]:
            seen = _difference(first, last, name)
            return f"the {name} of sample {len(taken)} ({arm}) is not that of the first: {seen}"
    return ""


def _difference(first: Sample, last: Sample, name: str) -> str:
    before, now = first[name], last[name]
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return f"{str(before)[:12]} and {str(now)[:12]}"
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return ", ".join(f"{key}: {before.get(key)!r} and {now.get(key)!r}" for key in changed)


def _numbers(experiment: Experiment, taken: Sequence[tuple[str, Sample]]) -> dict[str, Any]:
    """Samples, paired ratios, the judgement, and both arms beside the anchor."""
    values = [(arm, float(sample["value"])) for arm, sample in taken]
    found = pairs.ratios(values)
    middle = {name: statistics.median(v for arm, v in values if arm == name) for name in (OFF, ON, ANCHOR)}
    row = {name: middle[name] / experiment.per_row(name) for name in middle}
    return {
        "samples": [
            {"arm": arm, "value": value, "spread": sample["spread"], "clocks": sample["clocks"]}
            for (arm, value), (_, sample) in zip(values, taken, strict=True)
        ],
        "medians": middle,
        "ratios": list(found),
        "judgement": pairs.judge(found).as_dict(),
        "anchor": {name: row[ANCHOR] / row[name] for name in (OFF, ON)},
    }


def describe(document: Mapping[str, Any]) -> str:
    """The document in words: what was compared, what was equal, what came of it."""
    if "arms" not in document:
        return f"{document['variable']}: {document['refused']}"
    lines = [f"{document['variable']}: off {document['arms'][OFF]}, on {document['arms'][ON]}"]
    for name, value in (document["equal"] or {}).items():
        lines += _in_words(name, value)
    if document["refused"]:
        return "\n".join([*lines, f"REFUSED, no times: {document['refused']}"])
    if document["traced"]:
        return "\n".join([*lines, f"TRACED, no times: {document['traced']}"])
    for arm, value in document["medians"].items():
        lines.append(f"{arm:<4} {value:.6g} {document['unit']} ({beside(document, arm)})")
    return "\n".join([*lines, pairs.Judgement.from_dict(document["judgement"]).describe()])


def beside(document: Mapping[str, Any], arm: str) -> str:
    """What an arm is beside the anchor."""
    if arm == ANCHOR:
        return str(document["arms"][ANCHOR])
    times = document["anchor"][arm]
    if document["mode"] == "case":
        return f"{1 / times:.3f}x the time of the least case"
    if document["mode"] == "generate":
        return f"{times:.3f}x autoregressive"
    return f"a row {times:.3f}x as fast as one row alone"


def _in_words(name: str, value: Any) -> list[str]:
    if not isinstance(value, dict):
        return [f"{name.replace('_', ' ')}: {value}"]
    return [f"{name.replace('_', ' ')}, {arm}: {_flat(found)}" for arm, found in value.items()]


def _flat(value: Any) -> str:
    if not isinstance(value, dict):
        return f"{value:.3g}" if isinstance(value, float) else str(value)
    parts = [(name, f"({_flat(v)})" if isinstance(v, dict) else _flat(v)) for name, v in value.items()]
    return ", ".join(f"{name} {text}" for name, text in parts)
