"""Environment switches, in one table. They narrow what runs; none makes a request admissible that was not.

The environment is read once a process, when the first decision is made; what changes afterwards is not seen. Inside
`override` other values hold. A value that does not parse is an error at its first use.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from hipfire_kernels.errors import InputError
from hipfire_kernels.running.attention import PARTIALS_ROWS

_log = logging.getLogger(__name__)

PREFIX = "HIPFIRE_"
MIN_CTX_VARIABLE = "HIPFIRE_FA_PERTOKEN_MIN_CTX"
MIN_CTX_DEFAULT = 4096
VERIFY_ATTN = "HIPFIRE_VERIFY_ATTN"
PARTIALS_ROWS_VARIABLE = "HIPFIRE_FLASH_PARTIALS_BATCH"
FLASH_PREFILL, PREFILL_KERNEL = "HIPFIRE_FLASH_PREFILL", "HIPFIRE_FLASH_PREFILL_KERNEL"

GRAPH_OFF = (("gfx1100", "mq4"), ("gfx1201", "mq4"))
"""Archs and weight formats on which upstream reports a replayed verify graph as slower than direct launches (hipfire
#695, #708)."""


@dataclass(frozen=True)
class Policy:
    """The switches, resolved. `SWITCHES` says what each means.

    Attributes:
        multirow_min_ctx: the multi-row routes need a logical context strictly above this; 0 disables them. None for
            the measured crossover, or `MIN_CTX_DEFAULT` where none was measured.
        verify_graph: whether verify attention is captured and replayed; None for the rule of `use_verify_graph`.
        partials_rows: query rows whose partials are held at once.
        draft_window: None for the windows the draft declares; else keys that every layer sees at most, 0 for all.
        draft_ctx_cap: keys of context beyond which a draft without windows is not asked any more; 0 for no such end.
        verify_attn: whether the split verify kernels may run.
        flash_prefill: whether the prefill kernel on matrix units may run.
        prefill_kernel: "auto" (it is chosen for more rows than a verify block has) or "batched" (it is not).
        adaptive_b: whether fewer rows than drafted may be verified, where a request does not say.
        evidence: "reported" for all evidence, "measured" for that of measurements alone.
    """

    multirow_min_ctx: int | None = None
    verify_graph: bool | None = None
    partials_rows: int = PARTIALS_ROWS
    draft_window: int | None = None
    draft_ctx_cap: int = 8192
    verify_attn: bool = True
    flash_prefill: bool = True
    prefill_kernel: str = "auto"
    adaptive_b: bool = True
    evidence: str = "reported"

    def use_verify_graph(self, arch: str, weights: str) -> bool:
        """Whether verify attention is captured and replayed, on a device that has graphs.

        Args:
            arch: without feature suffix.
            weights: format of the target's weights: "mq4", "f32".
        """
        return (arch, weights) not in GRAPH_OFF if self.verify_graph is None else self.verify_graph


@dataclass(frozen=True)
class Switch:
    """One variable.

    Attributes:
        name: of the variable.
        field: of `Policy`; None for a folder, which its reader looks up at each use.
        parse: the value from its text; ValueError says what is wrong.
        default: in words.
        legal: the legal values, in words.
        effect: what it changes or narrows.
        read_by: the module that acts on it.
    """

    name: str
    field: str | None
    parse: Callable[[str], Any]
    default: str
    legal: str
    effect: str
    read_by: str

    def value(self, text: str) -> Any:
        """The parsed value. InputError names the variable, the text and the legal values."""
        try:
            return self.parse(text)
        except ValueError as error:
            raise InputError(f"{self.name}={text!r} {error}; legal: {self.legal}") from None


def _whole(text: str) -> int:
    if not (text.isascii() and text.removeprefix("-").isdecimal()):
        raise ValueError("is not a whole number")
    return int(text)


def _within(low: int, high: int, text: str) -> int:
    value = _whole(text)
    if not low <= value <= high:
        raise ValueError("is out of range")
    return value


def _min_ctx(text: str) -> int:
    value = _whole(text)
    if value != 0 and value < MIN_CTX_DEFAULT:
        raise ValueError("would widen what is admitted")
    return value


def _word(choices: Mapping[str, Any], text: str) -> Any:
    if text not in choices:
        raise ValueError("is none of the legal values")
    return choices[text]


_LIMIT = 2**31 - 1

SWITCHES: tuple[Switch, ...] = (
    Switch(
        MIN_CTX_VARIABLE,
        "multirow_min_ctx",
        _min_ctx,
        f"the crossover in the evidence where it was measured, else {MIN_CTX_DEFAULT}",
        f"0 (the multi-row routes are off) or a number of keys, at least {MIN_CTX_DEFAULT}",
        "The multi-row routes rows4 and rows8 need a logical context strictly above it. It can raise what the evidence "
        "says, not lower it.",
        "dispatch/routes.py",
    ),
    Switch(
        "HIPFIRE_EVIDENCE",
        "evidence",
        functools.partial(_word, {"reported": "reported", "measured": "measured"}),
        Policy.evidence,
        "reported (all evidence counts) or measured (what others have published does not)",
        "Which evidence opens a route that needs some.",
        "dispatch/admission.py",
    ),
    Switch(
        "HIPFIRE_VERIFY_GRAPH",
        "verify_graph",
        functools.partial(_word, {"1": True, "0": False}),
        "off on " + " and ".join(f"{arch} with {weights.upper()} weights" for arch, weights in GRAPH_OFF) + ", else on",
        "1 (on) or 0 (off)",
        "Whether the attention of verify blocks is captured into a graph and replayed, on a device that has graphs. "
        "A graph holds graph-safe routes alone; unless it is 1, a block for which a faster route is admitted that no "
        "graph can hold runs directly.",
        "dispatch/graph.py",
    ),
    Switch(
        PARTIALS_ROWS_VARIABLE,
        "partials_rows",
        functools.partial(_within, 1, 4096),
        str(PARTIALS_ROWS),
        "a number of query rows, 1 .. 4096",
        "Query rows whose partials are held at once; more rows go in sub-batches. Bounds the workspace.",
        "dispatch/planning.py",
    ),
    Switch(
        VERIFY_ATTN,
        "verify_attn",
        functools.partial(_word, {"1": True, "0": False}),
        str(int(Policy.verify_attn)),
        "1 (on, where there is evidence for the arch) or 0 (off)",
        "Whether the routes verify_gqa and verify_mma may run, also where one is insisted on.",
        "dispatch/routes.py",
    ),
    Switch(
        FLASH_PREFILL,
        "flash_prefill",
        functools.partial(_word, {"1": True, "0": False}),
        str(int(Policy.flash_prefill)),
        "1 (on) or 0 (off)",
        "Whether the route wmma_prefill may run, also where it is insisted on.",
        "dispatch/routes.py",
    ),
    Switch(
        PREFILL_KERNEL,
        "prefill_kernel",
        functools.partial(_word, {"auto": "auto", "batched": "batched"}),
        Policy.prefill_kernel,
        "auto (wmma_prefill for more rows than a verify block has, where there is evidence for it) or batched "
        "(tile_batched)",
        "Which route takes a prefill by itself. A route that is insisted on is not affected.",
        "dispatch/routes.py",
    ),
    Switch(
        "HIPFIRE_DFLASH_WINDOW",
        "draft_window",
        functools.partial(_within, 0, _LIMIT),
        "what the draft declares for each layer",
        "0 (no layer has a window: all of the context is seen) or a number of keys, at least 1",
        "A number narrows every draft layer to that many keys; a layer that declares fewer keeps its own. "
        "Changes what is proposed and, but for rounding, no token that comes out.",
        "model/dflash.py",
    ),
    Switch(
        "HIPFIRE_DFLASH_CTX_CAP",
        "draft_ctx_cap",
        functools.partial(_within, 0, _LIMIT),
        str(Policy.draft_ctx_cap),
        "0 (no cap) or a number of keys",
        "Beyond this many keys of context a draft none of whose layers has a window is not asked any more: decoding "
        "goes on token by token, counted in the result as capped_cycles.",
        "model/dflash.py",
    ),
    Switch(
        "HIPFIRE_DFLASH_ADAPTIVE_B",
        "adaptive_b",
        functools.partial(_word, {"1": True, "0": False}),
        str(int(Policy.adaptive_b)),
        "1 (on) or 0 (off)",
        "Whether fewer rows than were drafted may be verified, by how many were accepted lately, in requests that do "
        "not say (`adaptive_b`). Changes how fast tokens come and, but for rounding, not which.",
        "model/conversation.py",
    ),
    Switch(
        "HIPFIRE_CACHE_DIR",
        None,
        str,
        "the user's cache folder",
        "a folder",
        "Where built kernels are kept.",
        "hipfire_kernels/building/storage.py",
    ),
    Switch(
        "HIPFIRE_EVIDENCE_DIR",
        None,
        str,
        "the user's config folder",
        "a folder",
        "Where `hfk qualify` writes evidence, and `hfk tune` its records below it, and where both are looked for.",
        "hipfire_kernels/building/storage.py",
    ),
    Switch(
        "HIPFIRE_KERNELS_FAMILIES",
        None,
        str,
        "none",
        "modules or .py files, separated by commas",
        "Kernel families of your own, known by name beside the library's; `hfk --families` sets it for what it starts.",
        "hipfire_kernels/authoring/registry.py",
    ),
    Switch(
        "HIPFIRE_KERNELS_BUNDLE",
        None,
        str,
        "none",
        "a folder that `hfk bundle` wrote",
        "Kernels built ahead: a build of exactly their source is served from there, without a compiler.",
        "hipfire_kernels/building/bundle.py",
    ),
)
"""Every variable that the library honours."""

_BY_NAME = {switch.name: switch for switch in SWITCHES}
_warned: set[str] = set()


class _Scope:
    """Variables, and the policy they make. Parsed when it is first asked for."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = {name: text for name, text in environ.items() if name.startswith(PREFIX)}

    @functools.cached_property
    def policy(self) -> Policy:
        for name in sorted(self.environ.keys() - _BY_NAME.keys() - _warned):
            _warned.add(name)
            _log.warning("%s is set, but no switch has that name; switches: %s", name, ", ".join(_BY_NAME))
        values = {
            switch.field: switch.value(self.environ[switch.name])
            for switch in SWITCHES
            if switch.field is not None and switch.name in self.environ
        }
        return Policy(**values)


_override: ContextVar[_Scope | None] = ContextVar("hipfire_policy", default=None)


@functools.cache
def _process() -> _Scope:
    return _Scope(os.environ)


def _scope() -> _Scope:
    return _override.get() or _process()


def current() -> Policy:
    """The policy in force: that of an enclosing `override`, else of the environment as it was at the first use.

    Raises:
        InputError: a variable does not parse. Naming it, its value and the legal values.
    """
    return _scope().policy


@contextlib.contextmanager
def override(environ: Mapping[str, str] | None = None, **fields: Any) -> Iterator[None]:
    """Decide by other values inside the block, in this thread (or task). The rest stays as it is outside.

    Args:
        environ: variables as the environment would have them.
        fields: the same by field of `Policy`; None for the default.

    Raises:
        InputError: a field that `Policy` does not have. What does not parse is an error at its first use.
    """
    changed = {**_scope().environ, **(environ or {})}
    names = {switch.field: switch.name for switch in SWITCHES if switch.field}
    for field, value in fields.items():
        if field not in names:
            raise InputError(f"{field!r} is no field of the policy; fields: {', '.join(map(str, names))}")
        changed.pop(names[field], None)
        if value is not None:
            changed[names[field]] = str(int(value) if isinstance(value, bool) else value)
    token = _override.set(_Scope(changed))
    try:
        yield
    finally:
        _override.reset(token)


def report() -> list[dict[str, Any]]:
    """The table with the values in force, for `hfk doctor`; `problem` says what is wrong with a value."""
    rows = []
    for switch in SWITCHES:
        text = (os.environ if switch.field is None else _scope().environ).get(switch.name)
        problem = None
        if text is not None:
            try:
                switch.value(text)
            except InputError as error:
                problem = str(error)
        rows.append(
            {
                "name": switch.name,
                "value": text,
                "default": switch.default,
                "legal": switch.legal,
                "effect": switch.effect,
                "problem": problem,
            }
        )
    return rows


def document() -> str:
    """docs/environment.md."""
    lines = [
        "# Environment variables",
        "",
        "Written from the table in `dispatch/policy.py` by its `document()`. `hfk doctor` shows the values in force.",
        "They are read once a process, folders at each use. A value that is not legal is an error when it is first",
        "needed. A variable can narrow what runs, never widen it.",
    ]
    for switch in SWITCHES:
        lines += [
            "",
            f"## {switch.name}",
            "",
            switch.effect,
            "",
            f"- Default: {switch.default}",
            f"- Legal: {switch.legal}",
            f"- Acted on in: `{switch.read_by}`",
        ]
    return "\n".join(lines) + "\n"
