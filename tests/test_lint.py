"""The templates are clean, and the linter finds what it is for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest

from hipfire_kernels import KernelFamily, cli, families
from hipfire_kernels.archs import arch
from hipfire_kernels.authoring import render, templates
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building.toolchains.registry import choose
from hipfire_kernels.inspecting import lint

ROWS = "attention_flash_q8_0_rows.hip.j2"
ROWS8 = families()["attention_flash_q8_0_rows"].variant(rows=8, head_dim=128)
START = "    const int head = block_x(), tile = block_y();\n"

Plant = Callable[[str, str], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Replaces a text of the rows template for this test."""
    original = templates._environment(None)

    def edit(old: str, new: str) -> None:
        assert original.loader is not None
        text = original.loader.get_source(original, ROWS)[0]
        assert text.count(old) == 1
        edited = jinja2.DictLoader({ROWS: text.replace(old, new)})
        changed = original.overlay(loader=jinja2.ChoiceLoader([edited, original.loader]), cache_size=0)
        monkeypatch.setattr(templates, "_environment", lambda folder: changed)

    return edit


def all_of(family: KernelFamily) -> list[Variant]:
    return list(family.variants())


def last_of(family: KernelFamily) -> list[Variant]:
    return all_of(family)[-1:]


@pytest.mark.parametrize("chosen", [last_of, pytest.param(all_of, marks=pytest.mark.long)])
def test_the_templates_are_clean(chosen: Callable[[KernelFamily], list[Variant]]) -> None:
    found = lint.lint([v for family in families().values() for v in chosen(family)])
    assert found.findings == ()
    assert found.compiled >= 3 * len(families())
    assert set(found.skipped) <= {"sm_90"}


@pytest.mark.parametrize(
    ("rule", "planted"),
    [
        ("warning", "const int unused = head;"),
        ("warning", "const float doubled = 0.1 * scale; partials[0] = doubled;"),
        ("warning", "const int cut = scale; partials[0] = (float)cut;"),
        ("warning", "int tile_no = 0; { int tile_no = head; partials[tile_no] = 0; } partials[tile_no] = 0;"),
        ("warning", "partials[0] = (float)*(const long long*)q;"),
        ("warning", "partials[0] = *(float*)q;"),
        ("address-space", "float* both = head % 2 ? scores : partials; both[tile] = 0;"),
        ("private-memory", "float x[64]; for (int i = 0; i < batch; ++i) x[positions[i]] = *q; *partials = x[head];"),
        ("lds", "__attribute__((shared)) float x[64]; x[lane()] = scale; block_sync(); partials[0] = x[head];"),
    ],
    ids=["unused", "double", "cut", "shadow", "alignment", "const", "flat", "private array", "undeclared LDS"],
)  # fmt: skip
def test_what_a_build_shows(rule: str, planted: str, plant: Plant) -> None:
    assert lint._compile(ROWS8, arch("gfx1100")) == []
    plant(START, f"{START}{planted}\n")
    assert {finding.rule for finding in lint._compile(ROWS8, arch("gfx1100"))} == {rule}


@pytest.mark.parametrize(
    "planted", ["partials[0] = ((const float2*)q)[tile].x;", "const int unused = head;", "partials[0] = nothing;"]
)  # fmt: skip
def test_what_clang_says_of_the_nvidia_dialect(planted: str, plant: Plant) -> None:
    assert lint._read_cuda(ROWS8, arch("sm_90")) == []
    plant(START, f"{START}{planted}\n")
    (finding,) = lint._read_cuda(ROWS8, arch("sm_90"))
    assert (finding.where, finding.rule) == ("attention_flash_q8_0_rows8_d4 sm_90", "warning")
    assert planted in finding.text


def test_what_the_host_shows(plant: Plant) -> None:
    plant(START, f"{START}const float doubled = 0.1 * scale; partials[0] = doubled;\n")
    (finding,) = lint._compile(ROWS8, arch("host"))
    assert finding.where == "attention_flash_q8_0_rows8_d4 host"
    assert "implicit conversion" in finding.text
    assert "0.1 * scale" in finding.text


def test_a_name_that_nobody_defines(plant: Plant) -> None:
    plant(START, f"{START}{{{{ nothing }}}}\n")
    found = lint.lint([ROWS8]).findings
    assert len(found) == 7
    assert {finding.rule for finding in found} == {"render"}
    assert "'nothing' is undefined" in found[0].text


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("int i = threadIdx.x;", "threadIdx"),
        ("int i = blockIdx.y * blockDim.x;", "blockIdx blockDim"),
        ("int i = __builtin_amdgcn_workitem_id_x();", "__builtin_amdgcn_workitem_id_x"),
        ("int i = hk::block.current;", "hk::block"),
        ("__syncthreads();", "__syncthreads"),
        ("x = __shfl_xor_sync(m, x, 1);", "__shfl_xor_sync"),
        ("__shared__ float x[4];", "__shared__"),
        ("if (__any_sync(m, x)) atomicAdd(p, __popc(x));", "__any_sync atomicAdd __popc"),
        ("__hip_atomic_fetch_add(p, x, 0, 1);", "__hip_atomic_fetch_add"),
        ("atomic_add(p, wave_any(x) + popcount_u32(y));", ""),
        ("{% if head_dim == 128 %}int i = hipThreadIdx_x;{% endif %}", "hipThreadIdx_x"),
        ("int i = thread() + lane();  // not threadIdx", ""),
        ("/* blockIdx\n */ int i = block_x(); {# hk::x #}", ""),
        ("SHARED(float, scores, 4, 0); __builtin_memcpy(&w, p, 2);", ""),
    ],
)
def test_words(code: str, word: str) -> None:
    found = list(lint.words("t.j2", f"\n{code}\n"))
    assert [finding.text.split()[0] for finding in found] == word.split()
    assert {finding.where for finding in found} <= {"t.j2:2"}


def test_a_long_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dialect_amd.h", "rows.hip.j2", "__init__.py"):
        (tmp_path / name).write_text(f"{'x' * 120}\n{{{{ x }}}}{'x' * 114}\n", encoding="utf-8")
    monkeypatch.setattr(lint, "resources", SimpleNamespace(files=lambda package: tmp_path))
    found = lint.lint([]).findings
    assert [finding.where for finding in found] == ["dialect_amd.h:2", "rows.hip.j2:2"]
    assert {(finding.rule, finding.text) for finding in found} == {("columns", "121 columns, 120 are allowed")}


def test_dialects_may_use_their_own_words() -> None:
    names = {name for parts in render._DIALECT_PARTS.values() for name in parts}
    for_all = {"vec.h", "vocabulary.h"}
    assert all(lint._DIALECT_FILE.search(name) for name in {*names, "matrix_amd.h", "host_entry.h.j2"} - for_all)
    assert not any(lint._DIALECT_FILE.search(n) for n in (ROWS, "q8_0.h.j2", "softmax.h", "matrix_maps.h", *for_all))


def test_the_command(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    for code, planted in ((0, ""), (1, "const int unused = head;")):
        plant(START, START + planted)
        with pytest.raises(SystemExit) as ended:
            cli.app(["lint", ROWS8.entry, "--json"])
        assert ended.value.code == code
        found = json.loads(capsys.readouterr().out)
        assert found["rendered"] == 7
        assert bool(found["findings"]) is bool(planted)


def test_every_word_of_the_warnings_is_known() -> None:
    """A compiler warns of an option that it does not know, which `-Werror` makes an error."""
    for name in ("gfx1100", "host"):
        choose(arch(name)).compile('extern "C" int f() { return 1; }', arch(name), lint.WARNINGS)
