"""A trace of what requests do: one JSON object a line, for people, `jq` and data frames.

Every record holds `event`, `request` (a number that tells the requests of a process apart) and `context`, the tokens
that the target's state covered before it:

    prefill   prompt, cached_prefix, prefill_tokens, seconds, routes
    cycle     kind, drafted, block, accepted, produced, draft_s, verify_s, routes
    end       stop_reason, tokens, repair, replayed_tokens

`kind` is "verify" for a block, "probe" for one that was drafted to be compared with what comes, "plain" for neither,
and "capped" for plain because of the draft's context cap. `drafted` counts the proposals, `block` the verified rows,
anchor included. `verify_s` is all of the cycle but the proposing. `routes` counts the event's attention calls by
route. A request that the caller truncates after its end has another `end`; one that is given up has none.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

from hipfire_kernels.errors import InputError
from hipfire_kernels.model.adaptive import Cycle
from hipfire_kernels.model.result import GenerationResult

_requests = itertools.count(1)


class TextFile(Protocol):
    """What a trace is written to."""

    def write(self, text: str, /) -> Any:
        """Write a text; a line at a time comes."""


class Trace:
    """Writes the records of one request.

    Args:
        target: a text file, or the path of one, which each record is appended to.

    Raises:
        InputError: the path cannot be written to.
    """

    def __init__(self, target: TextFile | str | os.PathLike[str]) -> None:
        self._number = next(_requests)
        self._seen: Counter[str] = Counter()
        self._end: dict[str, Any] = {}
        self._target = Path(target) if isinstance(target, (str, os.PathLike)) else target
        self._append("")

    def prefill(self, prompt: int, result: GenerationResult, seconds: float) -> None:
        """A prompt of so many tokens was processed."""
        self._write(
            "prefill",
            result.cached_prefix,
            prompt=prompt,
            cached_prefix=result.cached_prefix,
            prefill_tokens=result.prefill_tokens,
            seconds=seconds,
            routes=self._routes(result),
        )

    def cycle(self, context: int, result: GenerationResult, cycle: Cycle) -> None:
        """A cycle was run; it is the last one in the result."""
        self._write(
            "cycle",
            context,
            kind=cycle.kind,
            drafted=len(cycle.drafts),
            block=cycle.rows,
            accepted=result.accepted[-1],
            produced=result.produced[-1],
            draft_s=cycle.draft_s,
            verify_s=cycle.verify_s,
            routes=self._routes(result),
        )

    def end(self, context: int, result: GenerationResult) -> None:
        """The request has ended; said again only where it ended differently."""
        end = {
            "stop_reason": result.stop_reason,
            "tokens": len(result.tokens),
            "repair": result.repair,
            "replayed_tokens": result.replayed_tokens,
        }
        if end != self._end:
            self._end = end
            self._write("end", context, **end)

    def _routes(self, result: GenerationResult) -> dict[str, int]:
        """The attention calls since the last record, by route."""
        new, self._seen = result.routes - self._seen, result.routes.copy()
        return dict(new)

    def _write(self, event: str, context: int, **values: Any) -> None:
        self._append(json.dumps({"event": event, "request": self._number, "context": context, **values}) + "\n")

    def _append(self, text: str) -> None:
        if not isinstance(self._target, Path):
            self._target.write(text)
            return
        try:
            with self._target.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise InputError(
                f"trace {str(self._target)!r} cannot be written ({error.strerror}); name a file that can"
            ) from error
