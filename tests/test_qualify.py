"""hfk qualify: what it measures, what it makes of it, and that an interrupted run goes on where it was."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mutants import MUTANTS, _mutated_environment

from hipfire_kernels import cli
from hipfire_kernels.archs import arch
from hipfire_kernels.authoring import templates
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building.resources import Resources
from hipfire_kernels.checking.parity import Case
from hipfire_kernels.checking.parity import Checked as Found
from hipfire_kernels.dispatch import AttendRequest, admit, evidence, measure
from hipfire_kernels.dispatch import qualify as work
from hipfire_kernels.dispatch.measure import Settings, Track
from hipfire_kernels.dispatch.record import Crossover, Evidence, Speed
from hipfire_kernels.errors import DeviceError, InputError
from hipfire_kernels.running import devices as runtime
from hipfire_kernels.running.devices import device
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.devices.protocol import Device
from hipfire_kernels.running.timing import HostTimer, Times

TINY = Settings((128, 256), rounds=4, n_heads=2, n_kv_heads=1, parity_cases=8, parity_ctx=260, parity_long=0)
TESTS = Path(__file__).parent
ROWS_EDIT, TILE_EDIT = (
    next(m for m in MUTANTS if m.name == name) for name in ("row of the scatter off", "bound one short")
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: Device) -> Iterator[Path]:
    """The user's evidence folder, empty; little is measured by default."""
    monkeypatch.setenv("HIPFIRE_EVIDENCE_DIR", str(tmp_path))
    monkeypatch.setattr(measure, "settings_for", lambda device, quick: TINY)
    evidence.forget()
    yield tmp_path
    evidence.forget()


def fake_timer(ratios: Mapping[int, float]) -> Callable[[Device], Any]:
    """A timer under which the route takes 100 us, the established one `ratios` times that, timing after timing."""
    left = list(ratios.values())

    class Fake:
        def interleaved(self, calls: Any, rounds: int, warmup: int) -> dict[str, Times]:
            HostTimer().interleaved(calls, 1, 0)
            ratio = left.pop(0)
            return {"route": Times((100.0,) * rounds), "base": Times(tuple(100 * ratio for _ in range(rounds)))}

    return lambda device: Fake()


def run(out: Path, routes: tuple[str, ...] = ("rows8",), on_step: Any = lambda *_: None) -> list[Evidence]:
    about = work.targets("host", routes, (128,), TINY)
    return work.qualify(device("host"), about, TINY, out, on_step)


def route_at(ctx: int, rows: int = 16) -> str | None:
    return admit(AttendRequest("host", "verify", "q8_0", 128, 24, 4, rows, ctx, "chain", False, False)).route


def hfk(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.app(["qualify", *arguments])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


# ---- a run ----------------------------------------------------------------------------------------------------------


MULTIROW = ("--route", "rows8", "--route", "rows4")


def test_it_opens_the_routes_it_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "timer", fake_timer({i: 0.9 if i in (0, 4) else 1.5 for i in range(8)}))
    assert route_at(300) == "tile_batched"
    code, out, err = hfk(capsys, "--device", "host", "--head-dim", "128", *MULTIROW)
    assert code == 0, err
    assert "1.50x to 1.50x from 256 keys on" in out
    assert "qualify 12/12 rows4 d128 timing ctx 256 B7: 1.50x" in err
    assert [p.name for p in folder.iterdir()] == ["host.json"]
    assert (route_at(256), route_at(257), route_at(257, rows=7)) == ("tile_batched", "rows8", "rows4")
    record = evidence.find("host", "rows8", 128)
    assert record is not None
    assert record.crossover == Crossover(256, 128, None)
    assert record.parity.cases == TINY.parity_cases
    assert record.shape.rows == (8, 16)
    assert len(record.speed) == 4
    assert set(record.digests or {}) == {
        "attention_flash_q8_0_rows8_d4",
        "attention_flash_reduce_batched_d4",
        "attention_flash_q8_0_tile_batched_d4",
    }


def test_it_times_by_the_clock_on_the_host(folder: Path) -> None:
    (record,) = run(folder / "out.json")
    assert record.parity.ok
    assert len(record.speed) == 4
    assert all(s.route_us and s.established_us and s.quartiles for s in record.speed)
    assert evidence.read_file(folder / "out.json") == (record,)


def test_the_order_of_timed_calls_alternates() -> None:
    called: list[str] = []
    times = HostTimer().interleaved({name: lambda name=name: called.append(name) for name in "ab"}, 3, warmup=1)
    assert "".join(called) == "ab" + "ab" + "ba" + "ab"
    assert [len(t.samples) for t in times.values()] == [3, 3]


def test_records_of_other_routes_stay_in_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "timer", fake_timer(dict.fromkeys(range(12), 2.0)))
    for routes in (("rows8",), ("rows4",), ("rows8",)):
        monkeypatch.setattr(measure, "timer", fake_timer(dict.fromkeys(range(4), 2.0)))
        run(folder / "host.json", routes)
    assert {r.route for r in evidence.read_file(folder / "host.json")} == {"rows4", "rows8"}
    (folder / "host.json").write_text("{}")
    with pytest.raises(InputError, match="schema is None"):
        run(folder / "host.json")


# ---- what does not qualify ------------------------------------------------------------------------------------------


def test_a_slower_route_is_not_admitted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "timer", fake_timer({0: 1.5, 1: 1.5, 2: 1.2, 3: 0.97}))
    code, out, _ = hfk(capsys, "--device", "host", "--route", "rows8", "--head-dim", "128")
    assert code == 1
    assert "NOT ADMITTED" in out
    assert "beyond noise: 0.97x (0.97 .. 0.97) at ctx 256, 16 rows" in out
    assert route_at(300) == "tile_batched"


@pytest.mark.parametrize("taken", ["vgpr_spills", "sgpr_spills", "scratch_bytes"])
def test_a_kernel_that_spills_is_not_admitted(taken: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the three alone, and of the last kernel that a call launches."""

    def spilling(variant: Variant, *_: Any) -> Any:
        return SimpleNamespace(resources=Resources(vgprs=9, **({taken: 64} if "reduce" in variant.entry else {})))

    monkeypatch.setattr(measure, "build", spilling)
    (record,) = run(folder / "out.json")
    assert not record.verdict.admitted
    assert record.verdict.why == f"resources: attention_flash_reduce_batched_d4 has {taken} 64"
    assert record.speed == ()
    assert not record.parity.ok, "a kernel that is not admitted is not held either"


def test_every_kernel_that_a_route_may_launch_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    nothing = SimpleNamespace(resources=Resources())
    monkeypatch.setattr(measure, "build", lambda variant, *_: (built.append(variant.entry), nothing)[1])
    for name in ("verify_gqa", "dflash_n64"):
        (target,) = work.targets("host", (name,), (128,), TINY)
        built.clear()
        assert work._run(work.Step("resources", target), Track(device("host"), TINY)) == {"fault": ""}
        assert built == [v.entry for v in target.kernels()]
        assert any("reduce" in entry for entry in built)


@pytest.mark.parametrize(("name", "params"), [
    ("verify_gqa", {"rows": (4, 8, 16, 32)}), ("dflash_n64", {"kv": ("f32", "f16"), "sliding": (False, True)}),
])  # fmt: skip
def test_every_kernel_that_a_route_may_choose_is_held(
    name: str, params: dict[str, tuple[Any, ...]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[tuple[Any, ...], list[Case]] = {}

    def check(variant: Variant, case: Case, _: Device) -> Checked:
        held.setdefault(tuple(getattr(variant, name) for name in params), []).append(case)
        return Checked(1e-7, 1e-5)

    monkeypatch.setattr(measure, "check", check)
    (target,) = work.targets("host", (name,), (128,), TINY)
    found = work._run(work.Step("parity", target), Track(device("host"), TINY))
    assert set(held) == set(itertools.product(*params.values()))
    assert {len(cases) for cases in held.values()} == {TINY.parity_cases}
    assert found["cases"] == len(held) * TINY.parity_cases
    for chosen, cases in held.items():
        windowed = [case.seed for case in cases if case.window]
        sliding = dict(zip(params, chosen, strict=True)).get("sliding")
        assert windowed == ([seed for seed in range(TINY.parity_cases) if seed % 4] if sliding else [])


@dataclasses.dataclass(frozen=True)
class Checked(Found):
    """What `measure.check` gives of a case."""

    error: float
    limit: float
    fault: str = ""

    def describe(self) -> str:
        return f"FAILED {self.error}"


@pytest.mark.parametrize("place", [0, 3, 7])
def test_the_worst_error_is_recorded_wherever_it_is(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([8e-6 if i == place else 1e-6 / (i + 1) for i in range(TINY.parity_cases)])
    monkeypatch.setattr(measure, "check", lambda *_: Checked(next(errors), 1e-5))
    (target,) = work.targets("host", ("rows8",), (128,), TINY)
    found = measure.parity((target.variant,), device("host"), TINY)
    assert found == {"cases": TINY.parity_cases, "worst_error": 8e-6, "limit": 1e-5, "fault": ""}


@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_limit_that_grows_is_kept_with_the_error_it_is_for(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst case is the one nearest to its own limit; the record states both, and they agree."""
    larger = Checked(3e-5, 4e-5)
    cases = iter([larger if i == place else Checked(9e-7, 2e-6) for i in range(TINY.parity_cases)])
    monkeypatch.setattr(measure, "check", lambda *_: next(cases))
    (target,) = work.targets("host", ("rows8",), (128,), TINY)
    found = measure.parity((target.variant,), device("host"), TINY)
    assert (found["worst_error"], found["limit"], found["fault"]) == (3e-5, 4e-5, "")
    whole = {**found, "route_us": 1.0, "established_us": 2.0, "ratio": 2.0, "quartiles": [1.9, 2.1]}
    steps = [(step, whole) for step in work.steps([target], TINY)]
    record = work._record(target, steps, device("host"), TINY)
    assert (record.parity.worst_error, record.parity.limit, record.parity.ok) == (3e-5, 4e-5, True)


def test_the_first_wrong_case_ends_it_and_is_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([1e-6, 2e-5, 5e-5])
    monkeypatch.setattr(measure, "check", lambda *_: Checked(next(errors), 1e-5))
    (target,) = work.targets("host", ("rows8",), (128,), TINY)
    found = measure.parity((target.variant,), device("host"), TINY)
    assert found == {"cases": 2, "worst_error": 2e-5, "limit": 1e-5, "fault": "FAILED 2e-05"}


CHILD = """
import sys
from pathlib import Path
from mutants import MUTANTS, plant
plant(next(m for m in MUTANTS if m.name == sys.argv[1]))
from test_qualify import run
(record,) = run(Path(sys.argv[2]))
print(record.verdict.why if not record.verdict.admitted else "admitted")
"""


@pytest.mark.parametrize("fault", ["row of the scatter off", "maximum of one lane only"])
def test_a_wrong_kernel_is_not_admitted(fault: str, tmp_path: Path) -> None:
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", CHILD, fault, str(tmp_path / "out.json")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("parity: FAILED attention_flash_q8_0_rows8_d4 B")
    (record,) = evidence.read_file(tmp_path / "out.json")
    assert not record.parity.ok
    assert record.crossover is None


@pytest.mark.parametrize(("times", "admitted"), [(0.95, True), (1.05, False)])
def test_a_difference_in_what_was_timed_is_not_admitted(
    times: float, admitted: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may be its limit from the oracle, so both may be two limits apart: one element is so many times that off."""

    def off(track: Track, variant: Variant, q: Any, out: Any, ctx: int, splits: int | None = None) -> Any:
        call = prepare(track, variant, q, out, ctx, splits)

        def launched() -> None:
            call()
            if "rows8" in variant.entry:
                row = out[-1, -1]
                row[abs(row).argmax()] *= 1 + times * 2e-5

        return launched

    prepare = Track.call
    monkeypatch.setattr(Track, "call", off)
    monkeypatch.setattr(measure, "timer", fake_timer(dict.fromkeys(range(4), 2.0)))
    (record,) = run(folder / "out.json")
    assert record.verdict.admitted == admitted
    if not admitted:
        assert record.crossover is None
        said = r"timing: 2\.1\d?e-05 from attention_flash_q8_0_tile_batched_d4 at ctx 128, 8 rows"
        assert re.fullmatch(said, record.verdict.why), record.verdict.why


def test_what_was_timed_is_recorded_for_the_side_it_belongs_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The route takes 100 us, the established one 200."""
    monkeypatch.setattr(measure, "timer", fake_timer({0: 2.0, 1: 2.0, 2: 2.0, 3: 2.0}))
    (record,) = run(folder / "out.json")
    assert [(s.ctx, s.rows) for s in record.speed] == [(128, 8), (128, 16), (256, 8), (256, 16)]
    assert {(s.route_us, s.established_us, s.ratio, s.quartiles) for s in record.speed} == {
        (100.0, 200.0, 2.0, (2.0, 2.0))
    }


def test_evidence_is_bound_to_every_kernel_that_was_timed(folder: Path, measured: list[str]) -> None:
    """Those of the established route's calls as well: half of each ratio is theirs."""
    (record,) = run(folder / "out.json", ("verify_gqa",))
    gqa = [f"attention_verify_gqa_q8_r{rows}_g2_d4" for rows in (4, 8, 16, 32)]
    tile = ["attention_flash_q8_0_tile_batched_d4", "attention_flash_reduce_batched_d4"]
    assert set(record.digests or {}) == {*gqa, "attention_flash_reduce_batched_d4_splits", *tile}
    for entry, digest in (record.digests or {}).items():
        assert digest == evidence.source_digest(entry, "host")


def test_a_kernel_that_takes_the_device_down_ends_the_run_and_is_noted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> Any:
        raise DeviceError("illegal address")

    with monkeypatch.context() as broken:
        broken.setattr(measure, "check", gone)
        broken.setattr(type(device("host")), "to_device", gone)
        with pytest.raises(DeviceError, match=r"rows8 d128 parity: illegal address\. Noted; run it again"):
            run(folder / "out.json", ("rows8", "rows4"))
    assert not (folder / "out.json").exists()
    records = run(folder / "out.json", ("rows8", "rows4"))
    assert records[0].verdict.why == "parity: the device did no work any more after: illegal address"
    assert records[1].parity.ok


@pytest.mark.parametrize(
    ("low", "expected"),
    [
        ((1.1, 1.2, 1.3), Crossover(100, None, 200)),
        ((0.9, 1.2, 1.3), Crossover(200, 100, 300)),
        ((1.1, 0.9, 1.3), Crossover(300, 200, None)),
        ((1.1, 1.2, 0.9), None),
        ((1.1, 1.2, 1.0), None),
        ((), None),
    ],
)
def test_crossover(low: tuple[float, ...], expected: Crossover | None) -> None:
    """Of two rows, the worse one decides."""
    worse = [Speed(100 * (i + 1), 16, 1, 2, 2, (x, 3), None) for i, x in enumerate(low)]
    better = [Speed(100 * (i + 1), 8, 1, 2, 2, (2, 3), None) for i, x in enumerate(low)]
    assert work.crossover([*better, *worse]) == expected


# ---- interrupted ----------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that are measured, none of them for real."""
    done: list[str] = []

    def fake(step: work.Step, track: Any) -> dict[str, Any]:
        done.append(step.describe())
        return {
            "fault": "",
            "cases": 8,
            "worst_error": 1e-7,
            "limit": 1e-5,
            "route_us": 1.0,
            "established_us": 2.0,
            "ratio": 2.0,
            "quartiles": [1.9, 2.1],
        }

    monkeypatch.setattr(work, "_run", fake)
    return done


STEPS = 6


@pytest.mark.parametrize("after", range(1, STEPS + 1))
def test_interrupted_it_goes_on_where_it_was(after: int, folder: Path, measured: list[str]) -> None:
    def stop(*_: Any) -> None:
        if len(measured) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder / "out.json", on_step=stop)
    assert not (folder / "out.json").exists()
    journal = folder / "out.json.progress.jsonl"
    with journal.open("ab") as file:
        file.write(b'\n{"key": "cut o')
    known: list[bool] = []
    (record,) = run(folder / "out.json", on_step=lambda step, result, was: known.append(was))
    assert known == [True] * after + [False] * (STEPS - after)
    assert len(measured) == STEPS == len(set(measured))
    assert record.verdict.admitted
    assert not journal.exists()


def test_a_crash_inside_a_step_keeps_those_before(
    folder: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    working = work._run

    def crashing(step: work.Step, track: Any) -> dict[str, Any]:
        if step.ctx == 256:
            raise MemoryError
        return working(step, track)

    monkeypatch.setattr(work, "_run", crashing)
    with pytest.raises(MemoryError):
        run(folder / "out.json")
    assert len(measured) == 4
    monkeypatch.setattr(work, "_run", working)
    run(folder / "out.json")
    assert len(measured) == STEPS


def _other_value(value: Any) -> Any:
    return (*value, 384) if isinstance(value, tuple) else value + 1


class Bound:
    """What a step's result depends on, and the journal's key of it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.identity = {"device": "A card", "driver": "1", "toolchain": "a compiler"}
        self.settings, self.version = TINY, "0"
        self.about = {"arch": "host", "route": "verify_gqa", "head_dim": 128}
        self.step: dict[str, Any] = {"kind": "timing", "ctx": 128, "rows": 8}
        self.changed_source = ""
        monkeypatch.setattr(measure, "identity", lambda device: dict(self.identity))

        def digest(entry: str, arch: str) -> str:
            return f"{entry}{entry == self.changed_source}"

        digest.cache_clear = lambda: None  # type: ignore[attr-defined]
        monkeypatch.setattr(evidence, "source_digest", digest)
        self._folder, self._patch = folder, monkeypatch

    def made(self) -> tuple[work.Journal, work.Step]:
        self._patch.setattr(work, "__version__", self.version)
        a = self.about
        (target,) = work.targets("host", (str(a["route"]),), (int(str(a["head_dim"])),), self.settings)
        step = work.Step(target=dataclasses.replace(target, arch=str(a["arch"])), **self.step)
        return work.Journal(self._folder / "out.json", device("host"), self.settings), step


DEPENDS = {
    **{name: lambda b, n=name: b.identity.update({n: "another"}) for name in ("device", "driver", "toolchain")},
    **{
        f.name: lambda b, n=f.name: setattr(
            b, "settings", dataclasses.replace(TINY, **{n: _other_value(getattr(TINY, n))})
        )
        for f in dataclasses.fields(Settings)
        if f.name not in ("n_heads", "n_kv_heads")
    },
    "heads": lambda b: setattr(b, "settings", dataclasses.replace(TINY, n_heads=4, n_kv_heads=2)),
    "version": lambda b: setattr(b, "version", "1"),
    "arch": lambda b: b.about.update(arch="gfx1100"),
    "route": lambda b: b.about.update(route="verify_mma"),
    "head_dim": lambda b: b.about.update(head_dim=256),
    "kind": lambda b: b.step.update(kind="parity"),
    "ctx": lambda b: b.step.update(ctx=256),
    "rows": lambda b: b.step.update(rows=16),
    **{
        f"source of {entry}": lambda b, e=entry: setattr(b, "changed_source", e)
        for entry in (
            *(f"attention_verify_gqa_q8_r{rows}_g2_d4" for rows in (4, 8, 16, 32)),
            "attention_flash_reduce_batched_d4_splits", "attention_flash_q8_0_tile_batched_d4",
            "attention_flash_reduce_batched_d4",
        )
    },
}  # fmt: skip
"""Everything that a result depends on: how each is changed alone."""


@pytest.mark.parametrize("part", DEPENDS)
def test_a_result_is_known_only_where_all_it_depends_on_is_the_same(
    part: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = Bound(folder, monkeypatch)
    journal, step = bound.made()
    journal.add(step, {"fault": "", "ratio": 2.0})
    journal, step = bound.made()
    assert journal.get(step) == {"fault": "", "ratio": 2.0}, "in another process"
    DEPENDS[part](bound)
    journal, step = bound.made()
    assert journal.get(step) is None
    journal.add(step, {"fault": "", "ratio": 3.0})
    assert journal.get(step) == {"fault": "", "ratio": 3.0}


def test_what_a_device_is_called_is_in_its_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the host: processor, system and compiler; of a GPU: name, driver, the driver's API and compiler."""
    here = measure.identity(device("host"))
    assert set(here) == {"device", "driver", "toolchain"}
    assert here["device"].startswith("host CPU (")
    assert here["driver"] == platform.platform()
    assert here["toolchain"].startswith("host: ")

    class Card(GpuDevice):
        def __init__(self, **facts: Any) -> None:
            self.arch, self.toolchain, self.facts = arch("host"), None, facts

        def describe(self) -> dict[str, Any]:
            return self.facts

    facts = {"name": "Card", "driver": "580.1", "driver_api": 13000}
    found = measure.identity(Card(**facts))
    assert (found["device"], found["driver"]) == ("Card", "driver 580.1, driver_api 13000")
    others = [measure.identity(Card(**{**facts, name: "9"})) for name in facts]
    assert len({json.dumps(one) for one in (found, *others)}) == 4


@pytest.mark.parametrize(("edit", "anew"), [(ROWS_EDIT, STEPS), (TILE_EDIT, 4)], ids=["rows", "tile_batched"])
def test_an_edited_template_restarts_what_it_changed(
    edit: Any, anew: int, folder: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(step: work.Step, *_: Any) -> None:
        if len(measured) == STEPS:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder / "out.json", on_step=stop)
    edited = _mutated_environment(edit)
    monkeypatch.setattr(templates, "_environment", lambda folder: edited)
    evidence.forget()
    run(folder / "out.json")
    assert len(measured) == STEPS + anew


def test_the_command_says_how_to_go_on(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = work._run

    def stopped(step: work.Step, track: Any) -> dict[str, Any]:
        if step.kind == "timing":
            raise KeyboardInterrupt
        return fake(step, track)

    arguments = ("--device", "host", "--route", "rows8", "--head-dim", "128")
    monkeypatch.setattr(work, "_run", stopped)
    code, _, err = hfk(capsys, *arguments)
    assert code == 130
    assert err.endswith("what is finished is kept, run it again to go on\ninterrupted\n")
    code, out, _ = hfk(capsys, *arguments, "--dry-run", "--json")
    assert [s["finished"] for s in json.loads(out)["steps"]] == [True, True, False, False, False, False]


# ---- the command ----------------------------------------------------------------------------------------------------


def test_a_dry_run_measures_and_writes_nothing(
    folder: Path, measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = hfk(capsys, "--device", "host", "--dry-run", *MULTIROW)
    assert code == 0
    assert measured == []
    assert list(folder.iterdir()) == []
    assert f"24 steps on host (host); evidence would go to {folder / 'host.json'}" in out
    assert out.count("timing") == 16


def test_without_a_gpu_auto_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(runtime, "_openable", lambda: iter(["host"]))
    assert hfk(capsys)[0] == 3
    code, _, err = hfk(capsys, "--device", "hip:9")
    assert code == 3
    assert "error: " in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--route", "rows16"], "--route is 'rows16'; did you mean rows8? legal: "),
        (["--route", "tile_batched"], "route tile_batched needs no evidence; those that do: "),
        (["--route", "rows8", "--head-dim", "64"], "route rows8 has no kernel for head_dim 64 with 2/1 heads"),
        (["--route", "verify_gqa", "--heads", "9/1"], "route verify_gqa has no kernel for head_dim 128, 256 with 9/1"),
        (["--heads", "5/2"], "n_heads is 5 with 2 KV heads; required: a positive multiple of the KV heads"),
        (["--heads", "5"], "--heads is '5'; required: query heads / KV heads"),
        (["--head-dim", "128,x"], "--head-dim is '128,x'; required: numbers with commas"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = hfk(capsys, "--device", "host", *arguments)
    assert code == 2
    assert message in err


def test_an_output_that_cannot_be_written(folder: Path, measured: list[str]) -> None:
    (folder / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        run(folder / "file" / "out.json")
    assert measured == []


def test_each_group_is_qualified_on_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "timer", fake_timer(dict.fromkeys(range(16), 2.0)))
    asked = ("--device", "host", "--head-dim", "128", "--route", "verify_gqa", "--heads")
    for heads, group in (("2/1", 2), ("6/2", 3)):
        assert evidence.find("host", "verify_gqa", 128, group) is None
        assert hfk(capsys, *asked, heads)[0] == 0
        evidence.forget()
    shapes = [(r.shape.n_heads, r.shape.n_kv_heads) for r in evidence.read_file(folder / "host.json")]
    assert shapes == [(2, 1), (6, 2)]


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "hipfire_kernels.cli", "qualify", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--dry-run" in done.stdout


def test_parity_cases_are_the_same_on_every_run_and_stand_around_tile_edges() -> None:
    cases = list(measure.parity_cases(256, Settings()))
    assert cases == list(measure.parity_cases(256, Settings()))
    assert {c.values for c in cases} == set(measure.VALUES)
    assert {c.ctx % 128 for c in cases} >= {0, 1, 127}
    assert cases[-1].ctx == 20676
    assert max(c.ctx for c in cases[:-1]) > 2048
    assert {c.rows < 8 for c in cases} == {True, False}
