"""A/B runs: fresh processes, one thing that differs, and no time before everything else was found equal."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_tune import MMA, tuned
from typer.testing import CliRunner

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.bench import ab, ab_arms, ab_card, pinned
from hipfire_kernels.bench.ab_arms import GenerateArms, KernelArms, Request, request
from hipfire_kernels.bench.kernels import Shape
from hipfire_kernels.bench.pairs import ANCHOR, OFF, ON
from hipfire_kernels.cli import app
from hipfire_kernels.dispatch import evidence, tuning
from hipfire_kernels.errors import CheckpointError, DeviceError, HipfireError, InputError
from hipfire_kernels.model import demo_pair_path
from hipfire_kernels.running.devices.protocol import Device

SMALL = Shape(256, 8, 128, 2, 1)

Sample = dict[str, Any]
Samples = Callable[[ab.Arm, str], Sample]


def kernels(off: str = "tile_batched", on: str = "rows8", shape: Shape = SMALL) -> KernelArms:
    return KernelArms(off, on, shape, "host", rounds=4)


def short() -> Request:
    """Four tokens of the demo pair, without kernels."""
    return replace(request(tokens=12, max_new_tokens=4), kv_format="f32")


def generation(variable: str = "HIPFIRE_FLASH_PARTIALS_BATCH", off: str = "16", on: str = "4") -> GenerateArms:
    return GenerateArms(variable, off, on, short(), "host")


def fake(value: float = 1.0, **other: Any) -> Sample:
    """What a process of a generation gives."""
    same = {"code": "c", "records": {"evidence": "r"}, "environment": {"sha256": "e"}, "machine": {"device": "m"}}
    same |= {"traced": None, "clocks": {}}
    ran = {"tokens": [1, 2, 3], "cycles": 2, "tau": 0.5, "stop_reason": "length", "routes": {"tile_batched": 4}}
    return {**same, **ran, "graph": {}, "capped_cycles": 0, "value": value, "spread": None, **other}


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> Callable[[Samples], None]:
    """Put something in the place of the processes."""
    return lambda give: monkeypatch.setattr(ab, "_sample", give)


# ---- whole runs -----------------------------------------------------------------------------------------------------


def once(known: dict[str, Sample]) -> Samples:
    """A real process for the first sample of an arm, which then stands for its others."""
    run = ab._sample

    def give(arm: ab.Arm, name: str) -> Sample:
        if arm.shown not in known:
            known[arm.shown] = run(arm, name)
        return known[arm.shown]

    return give


def test_a_kernel_run_from_end_to_end(host: Device, samples: Callable[[Samples], None]) -> None:
    seen: list[str] = []
    samples(once({}))
    document = ab.run(kernels(on="attention_flash_q8_0_rows8_d4"), repeats=4, step=seen.append)
    assert seen == document["order"]
    assert document["refused"] is None
    assert document["equal"]["same_bits"]
    assert set(document["equal"]["worst_error"]) == {OFF, ON, ANCHOR}
    assert max(document["equal"]["worst_error"].values()) < 1e-5
    assert len(document["ratios"]) == 12
    assert document["judgement"]["ratio"] == pytest.approx(float(np.median(document["ratios"])))
    assert document["pinned"]["shape"]["ctx"] == 256
    assert document["pinned"]["code"] == pinned.code_digest()
    assert document["pinned"]["records"] == pinned.records([])
    assert document["pinned"]["machine"] == pinned.device_facts(host)
    there = {**os.environ, "PYTHONHASHSEED": "0"}
    assert document["pinned"]["environment"]["sha256"] == pinned.environment(there)["sha256"]
    assert len(document["pinned"]["sources"]) == 2
    assert json.loads(json.dumps(document))["ratios"] == document["ratios"]
    assert "a row" in ab.describe(document)


def test_a_generation_from_end_to_end(samples: Callable[[Samples], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HIPFIRE_FLASH_PARTIALS_BATCH", raising=False)
    known: dict[str, Sample] = {}
    samples(once(known))
    document = ab.run(generation(on="unset"), repeats=4)
    assert document["refused"] is None
    assert document["equal"]["tokens"] == 4
    assert document["equal"]["ran"][OFF]["routes"] == {"numpy": known["16"]["routes"]["numpy"]}
    assert document["pinned"]["prompt"]["tokens"] == 12
    assert document["pinned"]["target"]["bytes"] > 1e6
    assert set(document["anchor"]) == {OFF, ON}
    assert known["16"]["environment"] == known["unset"]["environment"], "the variable itself takes no part"
    assert "autoregressive" in ab.describe(document)


# ---- refusals: no number is looked at -------------------------------------------------------------------------------


def refused(document: Mapping[str, Any]) -> str:
    assert document["samples"] == []
    assert document["ratios"] == []
    assert document["judgement"] is None
    assert "medians" not in document
    text = ab.describe(document)
    assert "s a token" not in text
    return text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokens": [1, 9, 3]}, r"tokens differ .* \[2\] and \[9\] at index 1"),
        ({"tokens": [1, 2]}, r"tokens differ .* at index 2 of 3 and 2"),
        ({"cycles": 3}, "cycles differ between off and on: 2 and 3"),
        ({"tau": 0.25}, "tau differ"),
        ({"code": "other"}, "the code of sample 3 .on. is not that of the first: c and other"),
        ({"records": {"evidence": "other"}}, "the records of sample 3 .on. is not .*: evidence: 'r' and 'other'"),
        ({"records": None}, "the records of sample 3"),
        ({"environment": {"sha256": "other"}}, "the environment of sample 3"),
        ({"machine": {"device": "other"}}, "the machine of sample 3"),
        ({"machine": {"device": "m", "driver": "d"}}, "the machine of sample 3 .on. is not .*: driver: None and 'd'"),
    ],
)
def test_arms_that_differ_give_no_times(samples: Callable[[Samples], None], changed: Sample, said: str) -> None:
    samples(lambda arm, name: fake(1.0, **changed) if "(on)" in name else fake(2.0))
    document = ab.run(generation(), repeats=4)
    assert document["refused"]
    text = refused(document)
    assert "REFUSED, no times" in text
    assert re.search(said, text), text


def test_the_anchor_has_its_own_cycles_but_the_same_tokens(samples: Callable[[Samples], None]) -> None:
    samples(lambda arm, name: fake(cycles=3, tau=0.0) if "(ar)" in name else fake())
    assert ab.run(generation(), repeats=4)["judgement"] is not None
    samples(lambda arm, name: fake(tokens=[7]) if "(ar)" in name else fake())
    assert "tokens differ between ar and off" in refused(ab.run(generation(), repeats=4))


def test_a_traced_run_proves_its_path_and_gives_no_times(samples: Callable[[Samples], None]) -> None:
    taken: list[str] = []

    def traced(arm: ab.Arm, name: str) -> Sample:
        taken.append(name)
        return fake(traced="AMD_LOG_LEVEL is set") | {"value": None}

    samples(traced)
    document = ab.run(generation(), repeats=4)
    assert "TRACED, no times: AMD_LOG_LEVEL is set" in refused(document)
    assert document["equal"]["ran"][ON]["routes"] == {"tile_batched": 4}
    assert len(taken) == 3, "one sample of each arm is enough"


def test_a_traced_process_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMD_LOG_LEVEL", "3")
    with generation().arms() as arms:
        found = ab._sample(arms[OFF], "sample")
    assert found["traced"] == "AMD_LOG_LEVEL is set"
    assert found["value"] is None
    assert len(found["tokens"]) == 4


def test_a_wrong_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is held against another input than the kernel had."""
    monkeypatch.setattr(ab_arms, "shape_arrays", _other)
    document = ab.run(kernels(), repeats=4)
    assert "from the oracle" in document["refused"]
    assert document["ratios"] == []


def _other(shape: Shape) -> Any:
    from hipfire_kernels.bench._ab_child import shape_arrays

    q, k, v, positions = shape_arrays(shape)
    return -q, k, v, positions


@pytest.mark.parametrize(("times", "right"), [(0.9, True), (1.1, False)])
@pytest.mark.parametrize("arm", [OFF, ON, ANCHOR])
def test_outputs_are_held_to_the_limit_and_no_further(times: float, right: bool, arm: str) -> None:
    """The worst element of one row is so many times its limit off."""
    experiment = kernels()
    rows = 1 if arm == ANCHOR else SMALL.rows
    output = experiment._oracle[-rows:].copy()
    row = output[-1, 1]
    row[np.abs(row).argmax()] *= 1 + times * 1e-5
    with experiment.arms():
        np.save(experiment._folder / f"{arm}.npy", output)
        said = experiment.unequal([(arm, {"output": "bits"})])
    assert (said == "") == right
    assert right or re.search(r"\(\w+\) is 1\.1e-05 from the oracle \(limit 1e-05\)", said), said


def test_an_arm_gives_the_same_bits_every_time() -> None:
    experiment = kernels()
    with experiment.arms():
        np.save(experiment._folder / "off.npy", experiment._oracle)
        taken = [(OFF, {"output": "bits"}), (ON, {"output": "others"})]
        assert experiment.unequal(taken[:1]) == ""
        for arm, bits in ((OFF, "bits"), (ON, "others")):
            assert experiment.unequal([*taken, (arm, {"output": bits})]) == ""
        said = experiment.unequal([*taken, (OFF, {"output": "others"})])
    assert said == "two runs of tile_batched (off) give different bits"


def test_the_anchor_is_beside_a_row_of_a_call(samples: Callable[[Samples], None], monkeypatch: Any) -> None:
    """8 rows in 16 us are 2 us a row, a fourth of the 8 us that one row alone takes."""
    monkeypatch.setattr(KernelArms, "unequal", lambda self, taken: "")
    monkeypatch.setattr(KernelArms, "facts", lambda self, taken: {})
    samples(lambda arm, name: fake({"off": 16.0, "on": 4.0, "ar": 8.0}[name.split("(")[1].rstrip(")")]))
    document = ab.run(kernels(), repeats=4)
    assert document["medians"] == {OFF: 16.0, ON: 4.0, ANCHOR: 8.0}
    assert document["anchor"] == {OFF: 4.0, ON: 16.0}
    assert "off  16 us a call (a row 4.000x as fast as one row alone)" in ab.describe(document)


def test_an_input_that_changes_meanwhile_is_refused(samples: Callable[[Samples], None]) -> None:
    experiment = generation()
    answers = iter([{"prompt": 1}, {"prompt": 2}])
    experiment.pinned = lambda: next(answers)  # type: ignore[method-assign]
    samples(lambda arm, name: fake())
    assert "changed on disk" in refused(ab.run(experiment, repeats=4))


def test_what_a_process_ends_with_is_raised_as_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    with generation().arms() as arms:
        lost = replace(arms[OFF], job={**arms[OFF].job, "target": "nowhere"})
        with pytest.raises(CheckpointError, match="sample 3: nowhere"):
            ab._sample(lost, "sample 3")
        broken = replace(arms[OFF], job={**arms[OFF].job, "mode": "?"})
        with pytest.raises(HipfireError, match=r"sample 4 ended with status 1 and no result:(.|\n)*Error"):
            ab._sample(broken, "sample 4")
        monkeypatch.setattr(ab, "LIMIT_S", 0.01)
        with pytest.raises(DeviceError, match=r"sample 5 did not end within 0\.01 s"):
            ab._sample(arms[OFF], "sample 5")


# ---- what may differ ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "off", "on", "said"),
    [
        ("HIPFIRE_VERIFY_GRAPH", "0", "2", "HIPFIRE_VERIFY_GRAPH='2'"),
        ("HIPFIRE_CACHE_DIR", "a", "b", "no switch or option"),
        ("temperature", "0", "1", "no switch or option"),
        ("route", "tile_batched", "rows9", "route is 'rows9'"),
        ("block_size", "8", "x", "block_size is 'x'"),
    ],
)
def test_illegal_variables_and_values(variable: str, off: str, on: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        generation(variable, off, on)


@pytest.mark.parametrize(
    ("off", "shape", "said"),
    [
        ("rows9", SMALL, "no verify route"),
        ("attention_flash_q8_0_rows8_d8", SMALL, "does not take a chain with head_dim 128"),
        ("attention_flash_q8_0_tile_batched_d4_tree", SMALL, "does not take a chain"),
        ("rows8", replace(SMALL, rows=4), "route rows8 does not take this shape: .*rows"),
    ],
)
def test_kernels_that_do_not_take_the_shape(off: str, shape: Shape, said: str) -> None:
    with pytest.raises(InputError, match=said):
        kernels(off, "tile_batched", shape)


def test_exactly_one_thing_differs_between_the_arms() -> None:
    with generation("kv_format", "q8_0", "f32").arms() as arms:
        assert arms[OFF].environ == arms[ON].environ
        assert {n for n in arms[OFF].job if arms[OFF].job[n] != arms[ON].job[n]} == {"kv_format"}
        assert {n for n in arms[OFF].job if arms[OFF].job[n] != arms[ANCHOR].job[n]} == {"block_size"}
    with generation().arms() as arms:
        assert arms[OFF].job == arms[ON].job
        assert (arms[OFF].environ, arms[ON].environ) == (
            {"HIPFIRE_FLASH_PARTIALS_BATCH": "16"},
            {"HIPFIRE_FLASH_PARTIALS_BATCH": "4"},
        )


def test_a_route_is_chosen_by_closing_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """By evidence on an arch that has some, and so by the way any user could."""
    experiment = generation("route", "tile_batched", "rows8")
    reported = [r for r in evidence.shipped() if r.arch == "gfx1100"]
    monkeypatch.setattr(ab_arms, "open_device", lambda name: _On())
    with evidence.using(reported), experiment.arms() as arms:
        found = {}
        for name, arm in arms.items():
            folder = Path(str(arm.environ["HIPFIRE_EVIDENCE_DIR"]))
            found[name] = {r.route for r in evidence.read_file(folder / "gfx1100.json") if r.verdict.admitted}
            assert len(evidence.read_file(folder / "gfx1100.json")) == len(reported)
    assert found == {OFF: set(), ON: {"rows8"}, ANCHOR: set()}


class _On:
    class arch:
        name = "gfx1100"


def test_the_runs_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in turn; one that fails is kept with its reason and stops no other."""
    made: list[Any] = []

    def run(experiment: Any, repeats: int) -> dict[str, Any]:
        made.append(experiment)
        if experiment.mode == "kernel":
            raise DeviceError("no such card")
        return {"kind": "ab", "variable": experiment.variable, "refused": "not run"}

    monkeypatch.setattr(ab, "run", run)
    said: list[str] = []
    found = ab_card.on_card("host", step=said.append)
    assert [e.mode for e in made] == sorted((e.mode for e in made), key=["kernel", "generate"].index)
    assert found[0] == {"kind": "ab", "schema": 1, "variable": "kernel=tile_batched,rows8", "refused": "no such card"}
    assert len(said) == len(found)
    assert {"route", "HIPFIRE_VERIFY_GRAPH"} <= {d["variable"] for d in found}
    longest = max(len(e._request.prompt) for e in made if e.mode == "generate")
    assert longest >= 4096 + 256, "the routes differ from there on"
    assert [d["variable"] for d in ab_card.on_card("host", ["graph"], step=said.append)] == ["HIPFIRE_VERIFY_GRAPH"]


# ---- what a run is bound to -----------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with a file of every kind that decides how it computes, and some that do not."""
    root = tmp_path / "package"
    for name in (*DECIDING, *OTHERS):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"of {name}")
    return root


DECIDING = (
    "archs.py", "running/devices/host.py", "templates/a.hip.j2", "templates/dialect_host.h", "templates/main.cpp",
    "dispatch/evidence/sm_90.json", "dispatch/tuning/sm_90.json", "model/loop.py", "bench/pairs.py",
)  # fmt: skip
OTHERS = ("bench/results/table.json", "model/demo_pair/target/config.json", "running/__pycache__/host.pyc", "py.typed")


@pytest.mark.parametrize("name", DECIDING)
def test_the_digest_of_the_code_follows_each_source(name: str, package: Path) -> None:
    digests = [pinned.code_digest(package)]
    for change in ("content", "name", "gone"):
        file = package / name
        if change == "content":
            file.write_text("of another")
        elif change == "name":
            file = file.rename(file.with_stem(f"{file.stem}_"))
            file.write_text(f"of {name}")
        else:
            file.with_stem(f"{file.stem}_").unlink()
        digests.append(pinned.code_digest(package))
    assert len(set(digests)) == 4


def test_the_digest_of_the_code_follows_nothing_else(package: Path) -> None:
    before = pinned.code_digest(package)
    for name in OTHERS:
        (package / name).write_text("another")
    assert pinned.code_digest(package) == before


def test_the_digest_is_of_this_package_with_all_that_ships() -> None:
    """Counted another way: what lies in the tree, by the folders that are the package's."""
    root = Path(__file__).parent.parent
    folders = {"hipfire_kernels": "", **{name: f"{name}/" for name in ("dispatch", "model", "bench", "templates")}}
    lying = {
        under + path.relative_to(root / folder).as_posix()
        for folder, under in folders.items()
        for path in (root / folder).rglob("*")
        if path.suffix in (".py", ".j2", ".h", ".cpp")
    }
    lying |= {f"dispatch/{p.parent.name}/{p.name}" for p in (root / "dispatch").glob("*/*.json")}
    assert {name for name, _ in pinned.sources(pinned.PACKAGE)} == lying
    assert "dispatch/evidence/gfx1100.json" in lying
    assert pinned.code_digest() == pinned.code_digest(pinned.PACKAGE)


def test_the_records_that_decide_are_part_of_what_a_run_is_bound_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the user as well, which lie outside of the package."""
    shipped = next(r for r in evidence.shipped() if r.arch == "gfx1100")
    own = tuned(MMA, {"splits": 9}, 16, 4096)
    seen = []
    for records, tunings in (([], []), ([shipped], []), ([replace(shipped, source="another")], []), ([], [own])):
        with evidence.using(records), tuning.using(tunings):
            seen.append(pinned.records([]))
    assert [found and list(found) for found in seen] == [["evidence", "tuning"]] * 4
    assert len({found["evidence"] for found in seen if found}) == 3
    assert len({found["tuning"] for found in seen if found}) == 2
    assert pinned.records(["HIPFIRE_VERIFY_GRAPH"]) is not None
    assert pinned.records(["HIPFIRE_EVIDENCE_DIR"]) is None, "that of the arms differs"


def test_the_digest_of_a_checkpoint_is_of_names_and_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(files: dict[str, bytes]) -> tuple[str, int]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        found = pinned.checkpoint_digest(folder)
        assert found["name"] == folder.name
        return found["sha256"], found["bytes"]

    whole, iterdir = made({"a": b"1", "b": b"22"}), Path.iterdir
    for reverse in (False, True):  # whatever the order in which a system lists them
        with monkeypatch.context() as patch:
            patch.setattr(Path, "iterdir", lambda self, reverse=reverse: sorted(iterdir(self), reverse=reverse))
            assert made({"a": b"1", "b": b"22"}) == whole
    assert made({"a": b"1", "b": b"22"})[1] == 3
    changed = [{"a": b"1", "b": b"23"}, {"a": b"2", "b": b"22"}, {"a": b"1", "c": b"22"}, {"a": b"12", "b": b"2"}]
    changed += [{"a": b"1"}, {"a": b"1", "b": b"22", "c": b""}, {"a": b"1", "b": b"22"}, {"a": b"1b\x0022"}]
    assert len({made(files)[0] for files in changed}) == len(changed)
    assert pinned.checkpoint_digest(tmp_path / "0" / "a")["sha256"] != pinned.checkpoint_digest(tmp_path / "2" / "b")
    with pytest.raises(InputError, match="cannot be read"):
        pinned.checkpoint_digest(tmp_path / "nothing")


def test_each_part_of_a_request_is_pinned(tmp_path: Path) -> None:
    asked = short()
    other = tmp_path / "draft"
    shutil.copytree(str(asked.draft), other)
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    changes: list[dict[str, Any]] = [{"prompt": (*asked.prompt[:-1], 0)}, {"prompt": asked.prompt[:-1]}]
    changes += [{"target": asked.draft}, {"draft": None}, {"draft": other}, {"max_new_tokens": 5}]
    changes += [{"kv_format": "q8_0"}, {"environ": (("HIPFIRE_VERIFY_GRAPH", "0"),)}]
    pins = [
        GenerateArms("block_size", "4", "8", replace(asked, **change), "host").pinned() for change in ({}, *changes)
    ]
    assert len({json.dumps(pin, sort_keys=True) for pin in pins}) == len(changes) + 1


def test_each_part_of_a_kernel_run_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        kernels(),
        kernels(on="rows4"),
        kernels(off="verify_gqa"),
        KernelArms("tile_batched", "rows8", SMALL, "host", 5),
    ]
    runs += [kernels(shape=replace(SMALL, **{name: value})) for name, value in
             {"ctx": 257, "rows": 9, "head_dim": 256, "n_heads": 4}.items()]  # fmt: skip
    pins = [json.dumps(run.pinned(), sort_keys=True) for run in runs]
    assert len(set(pins)) == len(pins)
    source = Variant.source
    for entry in json.loads(pins[0])["sources"]:
        with monkeypatch.context() as edited:
            edited.setattr(Variant, "source", lambda self, arch, e=entry: source(self, arch) + " " * (self.entry == e))
            assert json.dumps(kernels().pinned(), sort_keys=True) != pins[0]


def test_the_environment_is_shown_without_paths_and_secrets() -> None:
    environ = {"HIPFIRE_CACHE_DIR": "/home/x", "HIPFIRE_VERIFY_GRAPH": "0", "TOKEN": "secret"}
    found = pinned.environment(environ)
    assert found["shown"]["HIPFIRE_VERIFY_GRAPH"] == "0"
    assert found["shown"]["HIPFIRE_CACHE_DIR"].startswith("sha256 ")
    assert "secret" not in json.dumps(found)
    assert "/home" not in json.dumps(found)
    assert found["sha256"] != pinned.environment({**environ, "TOKEN": "other"})["sha256"]
    without = {name: text for name, text in environ.items() if name != "TOKEN"}
    others = [{**environ, "MORE": ""}, {"A": "1", "B": "2"}, {"A": "2", "B": "1"}, {"A": "1", "C": "2"}, {"A": "1"}]
    assert len({pinned.environment(each)["sha256"] for each in (environ, without, *others)}) == 7
    assert pinned.environment(dict(reversed(environ.items()))) == found, "in any order"
    changed = {**environ, "HIPFIRE_VERIFY_GRAPH": "1"}
    assert pinned.environment(changed, ["HIPFIRE_VERIFY_GRAPH"]) == pinned.environment(
        environ, ["HIPFIRE_VERIFY_GRAPH"]
    )


def test_a_tracer_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in pinned.TRACERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.gettrace", lambda: None)
    assert pinned.tracer() is None
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "lib.so")
    assert pinned.tracer() == "CUDA_INJECTION64_PATH is set"
    monkeypatch.setattr("sys.gettrace", lambda: print)
    assert "trace" in str(pinned.tracer())


def test_clocks_as_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = tmp_path / "card0" / "device"
    card.mkdir(parents=True)
    (card / "pp_dpm_sclk").write_text("0: 500Mhz\n1: 2304Mhz *\n")
    assert pinned._amd_clocks(tmp_path) == {"card0 pp_dpm_sclk": "1: 2304Mhz"}
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '1755 MHz, 2619 MHz, 1980 MHz, 41, 120.5 W'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert pinned.clocks("cuda:0")["clocks.sm"] == "1755 MHz"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert pinned.clocks("cuda:0") == {}
    assert "load" in pinned.clocks("host")


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command(samples: Callable[[Samples], None], tmp_path: Path) -> None:
    samples(lambda arm, name: fake(1.0 if "(on)" in name else 2.0))
    file = tmp_path / "ab.json"
    argv = ["ab", "--generate", "HIPFIRE_FLASH_PARTIALS_BATCH=16,4", "--repeats", "4", "--out", str(file), "--json"]
    done = CliRunner().invoke(app, argv)
    assert done.exit_code == 0
    assert json.loads(done.stdout)["judgement"]["verdict"] == "on is faster"
    assert json.loads(file.read_text())["anchor"] == {OFF: 1.0, ON: 2.0}
    samples(lambda arm, name: fake(tokens=[len(name)]))
    done = CliRunner().invoke(app, argv[:-3])
    assert done.exit_code == 1
    assert "REFUSED" in done.stdout


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "one of --kernel OFF ON and --generate"),
        (["--kernel", "rows8", "rows8", "--generate", "a=b,c"], "one of --kernel"),
        (["--generate", "route=rows8"], "required: NAME=OFF,ON"),
        (["--kernel", "rows8", "rows8", "--repeats", "3"], "even number, at least 4"),
        (["--kernel", "rows8", "rows8", "--ctx", "4"], "at least the rows"),
    ],
)
def test_wrong_usage(argv: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["ab", *argv])
    assert done.exit_code == 2
    assert said in done.stderr


def test_the_demo_pair_and_its_prompt_are_what_is_left_out() -> None:
    found = request(tokens=500)
    assert found.target == demo_pair_path() / "target"
    assert len(found.prompt) == 500
    assert found.prompt[:200] == request().prompt[:200]
