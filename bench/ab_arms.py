"""The two kinds of A/B experiment: one kernel against another on a shape, and one request with one thing changed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hipfire_kernels import families
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.bench import pinned
from hipfire_kernels.bench._ab_child import shape_arrays
from hipfire_kernels.bench.ab import Arm, Taken, first_of
from hipfire_kernels.bench.kernels import Shape
from hipfire_kernels.bench.pairs import ANCHOR, OFF, ON
from hipfire_kernels.checking import reference
from hipfire_kernels.checking.numbers import worst_row
from hipfire_kernels.dispatch import evidence, policy
from hipfire_kernels.dispatch.record import Verdict, dump
from hipfire_kernels.dispatch.request import AttendRequest
from hipfire_kernels.dispatch.routes import ROUTES, routes_of
from hipfire_kernels.errors import InputError
from hipfire_kernels.kernels.arguments import ATTEND
from hipfire_kernels.running.devices import device as open_device

# ---- one kernel against another -------------------------------------------------------------------------------------


class KernelArms:
    """One call of a verify kernel with its reducer, on random data of a shape. The anchor is what a row costs alone:
    the last row through the established kernel, as autoregressive decoding would call it.

    Args:
        off, on: routes, or entry names of variants.
        shape: of the call.
        rounds: timed calls of a sample, whose median is its value.

    Raises:
        InputError: a name is unknown, or its kernel takes no such shape.
    """

    mode = "kernel"
    variable = "kernel"
    unit = "us a call"

    def __init__(self, off: str, on: str, shape: Shape, device: str, rounds: int) -> None:
        self.device, self.shape, self.rounds = device, shape, rounds
        self._arch = open_device(device).arch.name
        self._request = AttendRequest(
            arch=self._arch,
            kv_format="q8_0",
            head_dim=shape.head_dim,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            rows=shape.rows,
            logical_ctx=shape.ctx,
            layout="chain",
            capturing=False,
            recording=False,
        )
        self._variants = {OFF: self._named(off), ON: self._named(on), ANCHOR: self._established()}
        self._shown = {OFF: off, ON: on, ANCHOR: f"1 row, {routes_of('verify')[-1].name}"}
        self._outputs: dict[str, Any] = {}

    def _established(self) -> Variant:
        return routes_of("verify")[-1].variant(self._request)

    def _named(self, name: str) -> Variant:
        known = {row.name: row for row in routes_of("verify")}
        if name in known:
            row = known[name]
            wrong = [c for c in (predicate(self._request) for predicate in row.predicates) if not c.ok]
            if wrong:
                raise InputError(f"route {name} does not take this shape: {'; '.join(map(str, wrong))}")
            return row.variant(self._request)
        variants = {v.entry: v for f in families().values() if f.oracle == ATTEND for v in f.variants()}
        variant = variants.get(name)
        if variant is None:
            raise InputError(f"{name!r} is no verify route ({', '.join(known)}) and no variant's entry name (hfk list)")
        shape, group = self.shape, self.shape.n_heads // self.shape.n_kv_heads
        wanted = {"head_dim": shape.head_dim, "mask": "causal", "group": group}
        if any(wanted.get(parameter, value) != value for parameter, value in variant.params):
            chain = f"a chain with head_dim {shape.head_dim} and {group} query heads for each KV head"
            raise InputError(f"{name} does not take {chain}")
        return variant

    @contextlib.contextmanager
    def arms(self) -> Iterator[Mapping[str, Arm]]:
        """See `ab.Experiment.arms`."""
        with tempfile.TemporaryDirectory() as folder:
            self._folder = Path(folder)
            self._outputs.clear()
            yield {name: Arm(self._shown[name], self._job(name)) for name in (OFF, ON, ANCHOR)}

    def _job(self, arm: str) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "device": self.device,
            "entry": self._variants[arm].entry,
            "shape": asdict(self.shape),
            "rows": 1 if arm == ANCHOR else self.shape.rows,
            "rounds": self.rounds,
            "out": str(self._folder / f"{arm}.npy"),
        }

    def pinned(self) -> dict[str, Any]:
        """See `ab.Experiment.pinned`."""
        sources = {v.entry: pinned.sha256(v.source(self._arch).encode()) for v in self._variants.values()}
        return {"shape": asdict(self.shape), "rounds": self.rounds, "sources": sources}

    def unequal(self, taken: Taken) -> str:
        """Outputs of an arm have the same bits every time; those of the arms are within their limits of the oracle and
        so of each other."""
        arm, sample = taken[-1]
        first = first_of(taken, arm)
        if first is not None and first is not sample:
            same = first["output"] == sample["output"]
            return "" if same else f"two runs of {self._shown[arm]} ({arm}) give different bits"
        self._outputs[arm] = np.load(self._folder / f"{arm}.npy")
        error = self._error(arm)
        limit = self._variants[arm].tolerance.worst_row
        return "" if error <= limit else f"{self._shown[arm]} ({arm}) is {error:.3g} from the oracle (limit {limit:g})"

    def _error(self, arm: str) -> float:
        got = self._outputs[arm]
        return worst_row(got, self._oracle[-len(got) :])

    @functools.cached_property
    def _oracle(self) -> Any:
        return reference.attend(*shape_arrays(self.shape))

    def facts(self, taken: Taken) -> dict[str, Any]:
        """See `ab.Experiment.facts`."""
        bits = [first_of(taken, arm) for arm in (OFF, ON)]
        return {
            "worst_error": {arm: self._error(arm) for arm in self._outputs},
            "same_bits": len({sample["output"] for sample in bits if sample}) == 1,
        }

    def per_row(self, arm: str) -> float:
        """See `ab.Experiment.per_row`."""
        return 1 if arm == ANCHOR else self.shape.rows


# ---- one request, one thing changed ---------------------------------------------------------------------------------

OPTIONS = ("kv_format", "block_size", "device")
"""Engine options that may differ between the arms."""

UNSET = "unset"
"""As a value of an environment switch: the variable is not there."""


@dataclass(frozen=True)
class Request:
    """What both arms generate. Greedy: sampled tokens would not be comparable.

    Attributes:
        target, draft: checkpoints; draft None for none.
        prompt: token ids.
        small: the models are so small that BLAS threads would fight those of the kernels.
        environ: variables that both arms set.
    """

    target: Path
    draft: Path | None
    prompt: tuple[int, ...]
    max_new_tokens: int = 64
    kv_format: str = "q8_0"
    small: bool = False
    environ: tuple[tuple[str, str], ...] = ()


def request(
    prompt: str | None = None,
    target: Path | None = None,
    draft: Path | None = None,
    tokens: int | None = None,
    max_new_tokens: int = 64,
    **environ: str,
) -> Request:
    """A request by what is left out of it: the demo pair, its first prompt, its draft.

    Args:
        target: None for the demo pair. `draft` None is the demo pair's with its target, else no draft.
        tokens: repeat the prompt to exactly so many; None to take it as it is.
        environ: variables that both arms set.

    Raises:
        CheckpointError: the target has no tokenizer.
    """
    from hipfire_kernels.model import Tokenizer, demo_pair_path, demo_prompts

    small = target is None
    if target is None:
        target, draft = demo_pair_path() / "target", draft or demo_pair_path() / "draft"
    ids = [int(t) for t in Tokenizer(target).encode(demo_prompts()[0] if prompt is None else prompt)]
    if tokens is not None:
        ids = (ids * -(-tokens // len(ids)))[:tokens]
    return Request(target, draft, tuple(ids), max_new_tokens, small=small, environ=tuple(environ.items()))


class GenerateArms:
    """One request, decoded by two engines that differ in one variable. The anchor decodes token by token, with the
    variable as in `off`.

    Args:
        variable: a switch of `dispatch.policy.SWITCHES`; one of `OPTIONS`; or "route": then each arm may take that
            route and the established one, and evidence opens no other.
        off, on: its values; `UNSET` for a switch that is not set.

    Raises:
        InputError: the variable or a value is not legal.
    """

    mode = "generate"
    unit = "s a token"

    def __init__(self, variable: str, off: str, on: str, request: Request, device: str) -> None:
        self.variable, self.device, self._request = variable, device, request
        self._values = {OFF: off, ON: on, ANCHOR: off}
        for value in (off, on):
            self._check(value)

    def _check(self, value: str) -> None:
        switches = {s.name: s for s in policy.SWITCHES if s.field}
        if self.variable in switches:
            if value != UNSET:
                switches[self.variable].value(value)
        elif self.variable == "route":
            legal = [r.name for r in routes_of("verify")]
            if value not in legal:
                raise InputError(f"route is {value!r}; legal: {', '.join(legal)}")
        elif self.variable == "block_size":
            if not value.isdecimal():
                raise InputError(f"block_size is {value!r}; required: a whole number")
        elif self.variable not in OPTIONS:
            names = ", ".join((*switches, *OPTIONS, "route"))
            raise InputError(f"{self.variable!r} is no switch or option of a generation; legal: {names}")

    @contextlib.contextmanager
    def arms(self) -> Iterator[Mapping[str, Arm]]:
        """See `ab.Experiment.arms`."""
        with tempfile.TemporaryDirectory() as folder:
            yield {name: self._arm(name, Path(folder)) for name in (OFF, ON, ANCHOR)}

    def _arm(self, name: str, folder: Path) -> Arm:
        value, request = self._values[name], self._request
        job: dict[str, Any] = {
            "mode": self.mode,
            "device": self.device,
            "target": str(request.target),
            "draft": str(request.draft) if request.draft else None,
            "kv_format": request.kv_format,
            "blas_threads": 1 if request.small else None,
            "prompt": request.prompt,
            "max_new_tokens": request.max_new_tokens,
            "block_size": None,
        }
        environ: dict[str, str | None] = dict(request.environ)
        if self.variable == "route":
            environ["HIPFIRE_EVIDENCE_DIR"] = str(self._only(value, folder / name))
        elif self.variable in OPTIONS:
            job[self.variable] = int(value) if self.variable == "block_size" else value
        else:
            environ[self.variable] = None if value == UNSET else value
        if name == ANCHOR:
            job["block_size"] = 1
        shown = f"token by token, {self.variable}={value}" if name == ANCHOR else value
        return Arm(shown, job, environ, self._differing)

    @property
    def _differing(self) -> tuple[str, ...]:
        """Variables of the environment that differ between the arms."""
        if self.variable in OPTIONS:
            return ()
        return ("HIPFIRE_EVIDENCE_DIR",) if self.variable == "route" else (self.variable,)

    def _only(self, route: str, folder: Path) -> Path:
        """A folder of evidence like that in force, but for the records of other routes, which admit nothing."""
        arch = open_device(self.device).arch.name
        closed = Verdict(False, f"closed: this arm of an A/B run takes {route}")
        found = {}
        for row in ROUTES:
            params = families()[row.family].params
            for head_dim, group in itertools.product(params["head_dim"], params.get("group", (None,))):
                record = evidence.find(arch, row.name, head_dim, group)
                if record is not None:
                    found[record.key] = record if row.name == route else replace(record, verdict=closed)
        folder.mkdir()
        (folder / f"{arch}.json").write_text(dump(list(found.values())), encoding="utf-8")
        return folder

    def pinned(self) -> dict[str, Any]:
        """See `ab.Experiment.pinned`."""
        r = self._request
        ids = np.asarray(r.prompt, np.int64)
        return {
            "prompt": {"tokens": len(r.prompt), "sha256": pinned.sha256(ids.tobytes())},
            "target": pinned.checkpoint_digest(r.target),
            "draft": pinned.checkpoint_digest(r.draft) if r.draft else None,
            "max_new_tokens": r.max_new_tokens,
            "kv_format": r.kv_format,
            "set": dict(r.environ),
        }

    def unequal(self, taken: Taken) -> str:
        """Tokens are the same in all samples; cycles and tau in all that are not the anchor's."""
        arm, sample = taken[-1]
        for other_arm, other in taken[:-1]:
            anchored = (arm == ANCHOR) != (other_arm == ANCHOR)
            for name in ("tokens", "stop_reason") if anchored else ("tokens", "stop_reason", "cycles", "tau"):
                if sample[name] != other[name]:
                    return f"{name} differ between {other_arm} and {arm}: {_apart(other[name], sample[name])}"
        if sample["value"] is None and not sample["traced"]:
            return f"there is no time a token: {len(sample['tokens'])} token came, the prefill's; ask for more"
        return ""

    def facts(self, taken: Taken) -> dict[str, Any]:
        """See `ab.Experiment.facts`."""
        by_arm = dict(reversed(taken))
        ran = {arm: {name: by_arm[arm][name] for name in ("routes", "graph", "capped_cycles")} for arm in by_arm}
        some = by_arm.get(OFF) or by_arm.get(ON) or {}
        return {
            "tokens": len(some.get("tokens", ())),
            "tokens_sha256": pinned.sha256(np.asarray(some.get("tokens", ()), np.int64).tobytes()),
            "cycles": some.get("cycles"),
            "tau": some.get("tau"),
            "ran": ran,
            "same_path": ran.get(OFF) == ran.get(ON),
        }

    def per_row(self, arm: str) -> float:
        """See `ab.Experiment.per_row`."""
        return 1


def _apart(one: Any, other: Any) -> str:
    if not isinstance(one, list):
        return f"{one} and {other}"
    shorter = min(len(one), len(other))
    at = next((i for i in range(shorter) if one[i] != other[i]), shorter)
    return f"{one[at : at + 1]} and {other[at : at + 1]} at index {at} of {len(one)} and {len(other)}"
