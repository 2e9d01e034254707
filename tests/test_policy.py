"""The table of switches: each changes what it says, none widens, what is not legal is an error, the page is its own."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from model_lab import BLOCKS, DRAFT, PROMPT, TARGET, changed, draft_tensors, target_tensors, write_checkpoint
from test_admission import REQUESTS, VERIFY
from test_evidence import record as measured_record
from test_graph import Card

import hipfire_kernels as hk
from hipfire_kernels.authoring.registry import Registry
from hipfire_kernels.building import bundle, storage
from hipfire_kernels.checking.parity import Case, inputs
from hipfire_kernels.dispatch import AttendRequest, VerifyGraph, admit, evidence, plan, policy
from hipfire_kernels.dispatch.record import SCHEMA, Crossover, load
from hipfire_kernels.errors import InputError
from hipfire_kernels.model import Engine, load_draft, load_target
from hipfire_kernels.model.attention import Float32Attention

NAMES = [switch.name for switch in policy.SWITCHES]

Behaviour = Callable[[Path, pytest.MonkeyPatch], None]
BEHAVIOURS: dict[str, Behaviour] = {}
"""For each switch the test that it changes behaviour."""


def of(name: str) -> Callable[[Behaviour], Behaviour]:
    """Register the test of a switch."""

    def register(test: Behaviour) -> Behaviour:
        BEHAVIOURS[name] = test
        return test

    return register


@pytest.mark.parametrize("name", NAMES)
def test_every_switch_changes_behaviour(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BEHAVIOURS[name](tmp_path, monkeypatch)


def test_there_is_no_other_switch() -> None:
    """What the sources read by name is in the table, and each row names the file that acts on it."""
    root = Path(__file__).parent.parent
    folders = ("hipfire_kernels", "dispatch", "model")
    text = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for folder in folders
        for path in (root / folder).rglob("*.py")
    }
    read = {word for source in text.values() for word in source.split('"') if word.startswith("HIPFIRE_")}
    assert {word for word in read if word.isupper() and word != policy.PREFIX} == set(NAMES)
    assert set(BEHAVIOURS) == set(NAMES)
    for switch in policy.SWITCHES:
        assert switch.read_by in text
        assert (switch.field or switch.name) in text[switch.read_by].replace("use_verify_graph", "verify_graph")


# ---- what each does ------------------------------------------------------------


@of("HIPFIRE_FA_PERTOKEN_MIN_CTX")
def _min_ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert admit(VERIFY).route == "rows8"
    for value in ("0", "20676"):
        with policy.override({"HIPFIRE_FA_PERTOKEN_MIN_CTX": value}):
            assert admit(VERIFY).route == "tile_batched"


@of("HIPFIRE_EVIDENCE")
def _evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with policy.override({"HIPFIRE_EVIDENCE": "reported"}):
        assert admit(VERIFY).route == "rows8"
    with policy.override({"HIPFIRE_EVIDENCE": "measured"}):
        decision = admit(VERIFY)
    assert decision.route == "tile_batched"
    assert {check.name for check in decision.rejected["rows8"]} == {"evidence"}


@of("HIPFIRE_VERIFY_GRAPH")
def _verify_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card: Any = Card()
    for value, active in (("1", True), ("0", False)):
        with policy.override({"HIPFIRE_VERIFY_GRAPH": value}):
            assert VerifyGraph(card, "mq4").active is VerifyGraph(card, "f32").active is active


@of("HIPFIRE_FLASH_PARTIALS_BATCH")
def _partials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = dataclasses.replace(VERIFY, arch="host", head_dim=64, n_heads=4, n_kv_heads=2, rows=12, logical_ctx=300)
    sizes = {}
    for value in ("4", "12", "16"):
        with policy.override({"HIPFIRE_FLASH_PARTIALS_BATCH": value}):
            sizes[value] = plan(request, hk.device("host")).workspace_bytes
    record = 4 * 4 * 3 * (2 + 64)  # bytes, heads, tiles of 300 keys, a partial
    assert sizes == {"4": 4 * record, "12": 12 * record, "16": 12 * record}


def test_partials_of_another_size_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    host, launched = hk.device("host"), []
    launch = type(host).launch

    def spy(self: Any, launches: Any, stream: Any = None) -> None:
        launched.append(len(launches))
        launch(self, launches, stream)

    monkeypatch.setattr(type(host), "launch", spy)
    i = inputs(Case(7, 300, 4, 2, 64))
    results = []
    for value in (3, 16, 3):
        with policy.override(partials_rows=value):
            results.append(hk.attend(i.q, i.k_cache, i.v_cache, i.positions).tobytes())
    assert results == [results[0]] * 3
    assert launched == [6, 2, 6]  # a tile kernel and a reducer for each sub-batch


PREFILL = dataclasses.replace(VERIFY, arch="host", rows=33)


def prefill_evidence() -> evidence.Evidence:
    """Evidence that opens wmma_prefill on the host at any context."""
    (record,) = load(json.dumps({"schema": SCHEMA, "records": [measured_record()]}), "a test")
    return dataclasses.replace(record, arch="host", route="wmma_prefill", crossover=None, digests={})


@of("HIPFIRE_VERIFY_ATTN")
def _verify_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = dataclasses.replace(prefill_evidence(), route="verify_gqa")
    with evidence.using([record]):
        assert admit(dataclasses.replace(PREFILL, rows=16)).route == "verify_gqa"
        with policy.override({"HIPFIRE_VERIFY_ATTN": "0"}):
            assert admit(dataclasses.replace(PREFILL, rows=16)).route == "tile_batched"


@of("HIPFIRE_FLASH_PREFILL")
def _flash_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with evidence.using([prefill_evidence()]):
        assert admit(PREFILL).route == admit(PREFILL, route_name="wmma_prefill").route == "wmma_prefill"
        with policy.override({"HIPFIRE_FLASH_PREFILL": "0"}):
            assert admit(PREFILL).route == "tile_batched"
            with pytest.raises(hk.NotAdmitted, match="HIPFIRE_FLASH_PREFILL: 0, required 1 or unset"):
                admit(PREFILL, route_name="wmma_prefill")


@of("HIPFIRE_FLASH_PREFILL_KERNEL")
def _prefill_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with evidence.using([prefill_evidence()]), policy.override({"HIPFIRE_FLASH_PREFILL_KERNEL": "batched"}):
        assert admit(PREFILL).route == "tile_batched"
        assert admit(PREFILL, route_name="wmma_prefill").route == "wmma_prefill"


def draft_of(folder: Path, **changes: Any) -> Any:
    config = changed(DRAFT, **changes)
    return load_draft(write_checkpoint(folder / "draft", config, draft_tensors(config)))


def engine_of(folder: Path, **changes: Any) -> Engine:
    target = load_target(write_checkpoint(folder / "target", TARGET, target_tensors(TARGET)))
    return Engine(target, draft_of(folder, **changes), kv_format="f32")


FULL = {"layer_types": ["full_attention"] * 3, "sliding_window": None, "use_sliding_window": None}


@of("HIPFIRE_DFLASH_WINDOW")
def _window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft declares windows of 7, 7 and none."""
    engine, seen = engine_of(tmp_path), []
    draft = Float32Attention.draft

    def spy(self: Any, *args: Any, window: int, causal: bool) -> Any:
        seen.append(window)
        return draft(self, *args, window=window, causal=causal)

    monkeypatch.setattr(Float32Attention, "draft", spy)
    tokens = []
    for value, windows in ((None, [7, 7, 0]), ("5", [5, 5, 5]), ("9", [7, 7, 9]), ("0", [0, 0, 0])):
        seen.clear()
        with policy.override({} if value is None else {"HIPFIRE_DFLASH_WINDOW": value}):
            tokens.append(engine.generate(PROMPT, 20, stop=(), **BLOCKS).tokens)
        assert seen[:3] == windows
    assert tokens == [tokens[0]] * 4


@of("HIPFIRE_DFLASH_CTX_CAP")
def _ctx_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tmp_path, **FULL)
    free = engine.generate(PROMPT, 40, stop=(), **BLOCKS)
    assert free.capped_cycles == 0
    with policy.override({"HIPFIRE_DFLASH_CTX_CAP": "50"}):
        capped = engine.generate(PROMPT, 40, stop=(), **BLOCKS)
    assert capped.tokens == free.tokens
    assert 0 < capped.capped_cycles < capped.cycles
    # Cycles before the cap are those of the free run, from there each gives one token.
    asked = capped.cycles - capped.capped_cycles
    assert capped.produced == free.produced[:asked] + [1] * capped.capped_cycles
    ends = [len(PROMPT) + sum(capped.produced[:n]) for n in (asked - 1, asked)]
    assert ends[0] <= 50 < ends[1]
    with policy.override({"HIPFIRE_DFLASH_CTX_CAP": "0"}):
        assert engine.generate(PROMPT, 40, stop=(), **BLOCKS) == free


def test_a_draft_with_a_window_has_no_cap(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    with policy.override(draft_ctx_cap=10):
        assert engine.generate(PROMPT, 20, stop=(), **BLOCKS).capped_cycles == 0
    with policy.override(draft_ctx_cap=10, draft_window=0):
        got = engine.generate(PROMPT, 20, stop=(), **BLOCKS)
        assert got.capped_cycles == got.cycles == 19
    with policy.override(draft_ctx_cap=10, draft_window=30):
        assert engine.generate(PROMPT, 20, stop=(), **BLOCKS).capped_cycles == 0


def test_the_default_cap() -> None:
    assert policy.Policy().draft_ctx_cap == 8192


@of("HIPFIRE_DFLASH_ADAPTIVE_B")
def _adaptive_b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is never right: fewer and fewer rows of its blocks are verified, unless that is off."""
    engine = engine_of(tmp_path)
    free = engine.generate(PROMPT, 40, stop=(), speculation="on")
    assert min(free.block_sizes) == 2
    for value in ("1", "0"):
        with policy.override({"HIPFIRE_DFLASH_ADAPTIVE_B": value}):
            got = engine.generate(PROMPT, 40, stop=(), speculation="on")
            assert got.tokens == free.tokens
            assert (got == free) == (value == "1")
            # What a request says counts, whatever the variable says.
            for adaptive in (True, False):
                asked = engine.generate(PROMPT, 40, stop=(), speculation="on", adaptive_b=adaptive)
                assert (asked == free) == adaptive
    assert got.block_sizes[8] == got.cycles - sum(got.block_sizes[rows] for rows in range(2, 8))
    assert got.block_sizes[8] > 20


@of("HIPFIRE_CACHE_DIR")
def _cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPFIRE_CACHE_DIR", str(tmp_path))
    assert storage.cache_root() == tmp_path


@of("HIPFIRE_EVIDENCE_DIR")
def _evidence_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPFIRE_EVIDENCE_DIR", str(tmp_path))
    assert storage.evidence_root() == tmp_path


@of("HIPFIRE_KERNELS_FAMILIES")
def _families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPFIRE_KERNELS_FAMILIES", str(tmp_path / "none.py"))
    with pytest.raises(InputError, match="there is no such file"):
        list(Registry())


@of("HIPFIRE_KERNELS_BUNDLE")
def _bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPFIRE_KERNELS_BUNDLE", str(tmp_path))
    monkeypatch.setattr(bundle, "_used", [])
    with pytest.raises(InputError, match=f"bundle {tmp_path}: manifest.json cannot be read"):
        bundle.current()


# ---- none widens ------------------------------------------------------------

CONTEXTS = st.sampled_from([1, 2000, 4095, 4096, 4097, 6000, 9000, 15000, 20000])
"""Few, so that a context, a minimum and a crossover meet in every order."""

VALUES: dict[str, st.SearchStrategy[str]] = {
    "HIPFIRE_FA_PERTOKEN_MIN_CTX": st.one_of(st.just("0"), CONTEXTS.filter(lambda ctx: ctx >= 4096).map(str)),
    "HIPFIRE_EVIDENCE": st.sampled_from(["reported", "measured"]),
    "HIPFIRE_VERIFY_GRAPH": st.sampled_from(["0", "1"]),
    "HIPFIRE_FLASH_PARTIALS_BATCH": st.integers(1, 4096).map(str),
    "HIPFIRE_VERIFY_ATTN": st.sampled_from(["0", "1"]),
    "HIPFIRE_FLASH_PREFILL": st.sampled_from(["0", "1"]),
    "HIPFIRE_FLASH_PREFILL_KERNEL": st.sampled_from(["auto", "batched"]),
    "HIPFIRE_DFLASH_WINDOW": st.integers(0, 10**6).map(str),
    "HIPFIRE_DFLASH_CTX_CAP": st.integers(0, 10**6).map(str),
    "HIPFIRE_DFLASH_ADAPTIVE_B": st.sampled_from(["0", "1"]),
}


def open_routes(request: AttendRequest) -> set[str]:
    decision = admit(request)
    return set(decision.checks) - set(decision.rejected)


def test_the_property_below_knows_every_switch() -> None:
    assert set(VALUES) == {switch.name for switch in policy.SWITCHES if switch.field}


def measured(ctx: int) -> evidence.Evidence:
    """Evidence that opens rows8 on gfx1201 from a context on."""
    (record,) = load(json.dumps({"schema": SCHEMA, "records": [measured_record()]}), "a test")
    return dataclasses.replace(record, crossover=Crossover(ctx, None, None))


MULTIROW = st.builds(
    dataclasses.replace,
    st.just(VERIFY),
    arch=st.sampled_from(["gfx1100", "gfx1201"]),
    rows=st.sampled_from([3, 4, 7, 8, 32, 33]),
    logical_ctx=CONTEXTS,
)
"""Requests that multi-row routes are open to more often than not."""


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.one_of(REQUESTS, MULTIROW), st.fixed_dictionaries({}, optional=VALUES), CONTEXTS)
@example(dataclasses.replace(VERIFY, arch="gfx1201", logical_ctx=6000), {"HIPFIRE_FA_PERTOKEN_MIN_CTX": "4096"}, 9000)
def test_a_switch_never_admits_something_new(request: AttendRequest, environ: dict[str, str], crossover: int) -> None:
    with evidence.using([*evidence.shipped(), measured(crossover)]):
        without = open_routes(request)
        with policy.override(environ):
            assert open_routes(request) <= without


@settings(max_examples=300, deadline=None, derandomize=True)
@given(MULTIROW, st.integers(4096, 9000), st.integers(0, 9000), CONTEXTS)
def test_a_higher_minimum_never_admits_something_new(
    request: AttendRequest, minimum: int, more: int, crossover: int
) -> None:
    with evidence.using([*evidence.shipped(), measured(crossover)]):
        without = open_routes(request)
        with policy.override(multirow_min_ctx=minimum):
            lower = open_routes(request)
            assert lower <= without
        with policy.override(multirow_min_ctx=minimum + more):
            assert open_routes(request) <= lower


def test_a_minimum_that_is_the_default_still_raises_a_lower_crossover() -> None:
    request = dataclasses.replace(VERIFY, arch="gfx1201", logical_ctx=2000)
    with evidence.using([measured(1000)]):
        assert admit(request).route == "rows8"
        with policy.override({"HIPFIRE_FA_PERTOKEN_MIN_CTX": "4096"}):
            assert admit(request).route == "tile_batched"


# ---- how they are read ------------------------------------------------------------


@pytest.fixture
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment has not been read yet."""
    monkeypatch.setattr(policy, "_warned", set())
    policy._process.cache_clear()
    yield
    policy._process.cache_clear()


def test_the_environment_is_read_once(fresh_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPFIRE_FA_PERTOKEN_MIN_CTX", "9000")
    assert policy.current().multirow_min_ctx == 9000
    monkeypatch.setenv("HIPFIRE_FA_PERTOKEN_MIN_CTX", "9001")
    assert policy.current().multirow_min_ctx == 9000
    monkeypatch.delenv("HIPFIRE_FA_PERTOKEN_MIN_CTX")
    assert policy.current().multirow_min_ctx == 9000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(
            ("HIPFIRE_FA_PERTOKEN_MIN_CTX", text)
            for text in ("abc", "", "-1", "4095", "4096.5", " 4096", "٤٠٩٦", "1_0")
        ),
        *(("HIPFIRE_EVIDENCE", text) for text in ("", "none", "Measured")),
        *(("HIPFIRE_VERIFY_GRAPH", text) for text in ("", "2", "on", "true")),
        *(("HIPFIRE_FLASH_PARTIALS_BATCH", text) for text in ("", "0", "4097", "x")),
        *(("HIPFIRE_VERIFY_ATTN", text) for text in ("", "2", "on")),
        *(("HIPFIRE_FLASH_PREFILL", text) for text in ("", "2", "on")),
        *(("HIPFIRE_FLASH_PREFILL_KERNEL", text) for text in ("", "wmma", "scalar")),
        *(("HIPFIRE_DFLASH_WINDOW", text) for text in ("", "-1", "2147483648", "x")),
        *(("HIPFIRE_DFLASH_CTX_CAP", text) for text in ("", "-1", "2147483648", "x")),
    ],
)
def test_a_value_that_is_not_legal_is_an_error_at_first_use(name: str, text: str) -> None:
    with policy.override({name: text}):
        for _ in range(2):
            with pytest.raises(InputError) as refused:
                policy.current()
        legal = next(switch.legal for switch in policy.SWITCHES if switch.name == name)
        assert str(refused.value).startswith(f"{name}={text!r} ")
        assert str(refused.value).endswith(f"; legal: {legal}")
        (row,) = (row for row in policy.report() if row["problem"])
        assert (row["name"], row["value"], row["problem"]) == (name, text, str(refused.value))


def test_an_illegal_environment_is_an_error_in_a_process(tmp_path: Path) -> None:
    program = "import hipfire_kernels as hk; from hipfire_kernels.dispatch import policy; policy.current()"
    environ = {**os.environ, "HIPFIRE_VERIFY_GRAPH": "maybe"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert done.returncode == 1
    assert "InputError: HIPFIRE_VERIFY_GRAPH='maybe' is none of the legal values; legal: 1 (on)" in done.stderr


def test_an_unknown_name_warns_once(fresh_process: None, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with policy.override({"HIPFIRE_VERIFY_ATN": "1", "OTHER": "x"}):
            policy.current()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "HIPFIRE_VERIFY_ATN is set, but no switch has that name; switches: HIPFIRE_FA" in caplog.text


def test_overrides_nest_and_end() -> None:
    outside = policy.current()
    with policy.override(draft_window=5, verify_graph=False):
        with policy.override({"HIPFIRE_DFLASH_WINDOW": "9"}, partials_rows=2):
            inner = policy.current()
            assert (inner.draft_window, inner.verify_graph, inner.partials_rows) == (9, False, 2)
        with policy.override(verify_graph=None):
            assert policy.current().verify_graph is None
        assert policy.current().draft_window == 5
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(policy.current).result() == outside
    assert policy.current() == outside
    with pytest.raises(InputError, match="'window' is no field of the policy; fields: multirow_min_ctx"):
        policy.override(window=1).__enter__()


def test_the_page_is_what_the_table_gives() -> None:
    """To write it: `python -c "from hipfire_kernels.dispatch import policy; print(policy.document(), end='')"`."""
    page = Path(__file__).parent.parent / "docs" / "environment.md"
    assert page.read_text(encoding="utf-8") == policy.document()
