"""What was found out about a compiler, remembered between processes.

A cache hit must not start a compiler, yet the key needs its version. So the answer is kept under a digest of
the question and of size, times and place of the files it depends on: another file at a path, or none, is
another question. Content is not read for this; a compiler binary has 100 MB. A program that is replaced with
size, modification and change time all preserved would go unnoticed, which no package manager does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from typing import cast

from hipfire_kernels.building.storage import PROBES, cache_root, make_private, publish

Facts = dict[str, str]

_known: dict[str, Facts] = {}


class ProbeFailed(Exception):
    """There is no answer now, and the lack of one must not be remembered."""


def recall(question: tuple[str, ...], files: Iterable[str], probe: Callable[[], Facts]) -> Facts:
    """The answer to `question`: from this process, from an earlier one, or from `probe`.

    Raises:
        ProbeFailed: `probe` did.
    """
    text = json.dumps([question, [_stamp(path) for path in files]])
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest not in _known:
        _known[digest] = _remembered(digest) or _ask(digest, probe)
    return _known[digest]


def _stamp(path: str) -> list[str | int]:
    try:
        status = os.stat(path)
    except OSError:
        return [path]
    return [path, os.path.realpath(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _remembered(digest: str) -> Facts | None:
    try:
        record = json.loads((cache_root() / PROBES / f"{digest}.json").read_bytes())
    except (OSError, ValueError):
        return None
    # The digest guards against a damaged file: a wrong version here would put wrong artifacts under a key.
    if not isinstance(record, dict) or record.get("sha256") != _digest(record.get("facts")):
        return None
    return cast(Facts, record["facts"])


def _ask(digest: str, probe: Callable[[], Facts]) -> Facts:
    facts = probe()
    root = cache_root()
    with contextlib.suppress(OSError):  # the artifact cache reports a folder that cannot be written
        make_private(root / PROBES, root)
        record = {"sha256": _digest(facts), "facts": facts}
        publish(root / PROBES / f"{digest}.json", json.dumps(record).encode())
    return facts


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
