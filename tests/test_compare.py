"""Another build in a kernel's place, revisions, `hfk diff` and `hfk isa`."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
from tree_lab import Tree

from hipfire_kernels import cli, families
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building.builder import Artifact, build
from hipfire_kernels.checking.parity import Case
from hipfire_kernels.errors import InputError
from hipfire_kernels.inspecting import compare, outline, revision
from hipfire_kernels.running.devices.host import HostDevice
from hipfire_kernels.running.devices.protocol import Device

ROWS8 = families()["attention_flash_q8_0_rows"].variant(rows=8, head_dim=128)
TILE = families()["attention_flash_q8_0_tile_batched"].variant(head_dim=128, mask="causal")
REDUCE = next(v for v in families()["attention_flash_reduce_batched"].variants() if v.head_dim == 128)
CASE = Case(5, 130, 2, 1, 128)
ROWS_TEMPLATE = "templates/attention_flash_q8_0_rows.hip.j2"


def edited(variant: Variant, old: str, new: str) -> Artifact:
    """The host build of a variant with an edited source."""
    now = revision.current(variant.entry, ["host"])
    text = now.source("host")
    assert text.count(old) == 1
    return build(dataclasses.replace(now, sources={"host": text.replace(old, new)}), "host")


class TestAnotherBuild:
    def test_parity_is_of_the_build_that_is_given(self) -> None:
        device = HostDevice()
        wrong = edited(ROWS8, "ROWS + own_row] = s", "ROWS + (ROWS - 1 - own_row)] = s")
        for artifact, right in ((build(ROWS8, "host"), True), (wrong, False), (build(ROWS8, "host"), True)):
            (result,) = compare.parity(compare.Build(ROWS8, artifact), [CASE], device)
            assert result.ok is right
        assert "launch" not in vars(device)

    def test_it_is_put_in_place_of_the_one_kernel_alone(self) -> None:
        wrong = edited(REDUCE, "total += sums[w]", "total += 2 * sums[w]")
        (as_reducer,) = compare.parity(compare.Build(REDUCE, wrong), [CASE], HostDevice())
        (as_rows,) = compare.parity(compare.Build(ROWS8, build(ROWS8, "host")), [CASE], HostDevice())
        assert (as_reducer.ok, as_rows.ok) == (False, True)

    def test_times_of_builds_and_of_variants(self) -> None:
        slow = edited(
            ROWS8,
            "float acc[ROWS][DIMS] = {};",
            "for (volatile int i = 0; i < 60000; ++i) {} float acc[ROWS][DIMS] = {};",
        )
        device = HostDevice()
        sides = {
            "now": compare.Build(ROWS8, build(ROWS8, "host")),
            "slow": compare.Build(ROWS8, slow),
            "tile": compare.Build(TILE, build(TILE, "host")),
        }
        times = compare.times(sides, compare.timing_case(ROWS8, 8, 128), device, rounds=5)
        assert list(times) == list(sides)
        assert all(len(taken.samples) == 5 for taken in times.values())
        assert times["slow"].median > 1.5 * times["now"].median
        assert "launch" not in vars(device)

    @pytest.mark.parametrize("name", list(families()))
    def test_every_family_can_be_timed(self, name: str, host: Device) -> None:
        variant = next(families()[name].variants())
        case = compare.timing_case(variant, 4, 16)
        (taken,) = compare.times({"x": compare.Build(variant, build(variant, "host"))}, case, HostDevice(), 2).values()
        assert len(taken.samples) == 2

    def test_a_case_that_one_does_not_take(self) -> None:
        wide = families()["attention_flash_q8_0_rows"].variant(rows=8, head_dim=256)
        sides = {n: compare.Build(v, build(v, "host")) for n, v in (("a", ROWS8), ("b", wide))}
        with pytest.raises(InputError, match="head_dim"):
            compare.times(sides, compare.timing_case(ROWS8, 8, 128), HostDevice())


def test_outlines_have_every_branch_once() -> None:
    tile = families()["attention_flash_q8_0_tile_batched"]
    groups = outline.groups(tile.variants(), "host")
    assert sorted(len(group) for group in groups) == [4] * 6
    assert {group[-1].mask for group in groups} == {"causal", "window", "tree"}
    last = outline.last(families()["attention_flash_q8_0_rows"].variants(), "gfx1100")
    assert [(v.rows, v.head_dim) for v in last] == [(8, 256)]


# ---- revisions ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    tree = Tree(tmp_path_factory.mktemp("diff"))
    tree.commit()
    tree.edit(ROWS_TEMPLATE, "float acc[ROWS][DIMS] = {};", "float acc[ROWS][DIMS] = {};  // edited")
    tree.edit("templates/kv_cache_write_q8_0_batched.hip.j2", "? 127.0f / amax", "? 126.0f / amax")
    tree.edit(
        "hipfire_kernels/kernels/draft.py",
        "grid=_draft_grid,",
        "grid=lambda v, s: (s.n_heads, s.rows, 1 + 0 * s.rows),",
    )
    return tree


class TestDiff:
    def test_a_revision_against_now(self, committed: Tree) -> None:
        done = committed.hfk("diff", f"{ROWS8.entry}@HEAD", ROWS8.entry, "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert "+    float acc[ROWS][DIMS] = {};  // edited" in found["source_diff"].splitlines()
        assert found["changes"] == []
        assert [side["parity"]["failures"] for side in found["sides"]] == [[], []]
        assert set(found["times"]) == {"A", "B"}
        assert found["sides"][0]["totals"] == found["sides"][1]["totals"]

    def test_what_is_wrong_is_not_timed(self, committed: Tree) -> None:
        done = committed.hfk("diff", "kv_cache_write_q8_0_batched@HEAD", "kv_cache_write_q8_0_batched")
        assert done.returncode == 0, done.stderr
        assert "parity of A on host: 21 cases, none wrong" in done.stdout
        assert "parity of B on host: 21 cases, 18 wrong" in done.stdout
        assert "time: not taken: one of the two is wrong" in done.stdout

    def test_a_revision_with_another_launch_is_not_run(self, committed: Tree) -> None:
        done = committed.hfk("diff", "attention_dflash_f32_d4@HEAD", "attention_dflash_f32_d4")
        assert done.returncode == 0, done.stderr
        assert "source: the same" in done.stdout
        assert "parity of A on host: not run: its arguments, LDS or grid are declared otherwise" in done.stdout
        assert re.search(
            r"block \(0, \d+, 0\), thread \d+: reads k\[\d+\], \d+ elements behind the end of k", done.stdout
        )
        assert "time: not taken: one of the two cannot be run" in done.stdout

    @pytest.mark.parametrize(
        ("a", "b", "said"),
        [
            ("attention_flash_q8_0_rows8_d4@nothing", "@HEAD", "git knows no revision 'nothing'"),
            ("attention_flash_q8_0_rows8_d4@", "@HEAD", "names no revision"),
            ("kernel@HEAD", "@HEAD", "revision HEAD has no kernel 'kernel'"),
            ("attention_flash_q8_0_rows8_d4", "attention_flash_q8_0_rows9_d4", "no kernel family or variant"),
        ],
    )
    def test_refusals(self, committed: Tree, a: str, b: str, said: str) -> None:
        done = committed.hfk("diff", a, b)
        assert done.returncode == 2
        assert said in done.stderr

    def test_two_variants(self, host: Device, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            cli.app(["diff", "attention_flash_q8_0_rows4_d4", ROWS8.entry])
        said = capsys.readouterr().out
        assert "+    SHARED(float, scores, 1024, 0);" in said
        assert "LDS B" in said
        assert said.count("none wrong") == 2
        assert "time on host: A " in said


def test_outside_a_checkout(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    done = tree.hfk("diff", f"{ROWS8.entry}@HEAD", "@HEAD", GIT_CEILING_DIRECTORIES=str(tmp_path))
    assert done.returncode == 2
    assert "is in no git checkout" in done.stderr


def test_isa(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.app(["isa", ROWS8.entry, "--arch", "gfx1100"])
    said = capsys.readouterr().out
    assert "| for (; key < least; ++key) {" in said
    assert "loop 2     load     global_load" in said
    assert "for (int key = 0; key < most; ++key) {" in said.splitlines()[-3]
    with pytest.raises(SystemExit):
        cli.app(["isa", ROWS8.entry, "--arch", "gfx1100", "--counts", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [loop["depth"] for loop in found["loops"]] == [1, 1, 1]
    assert found["totals"]["all"] == sum(n for kind, n in found["totals"].items() if kind != "all")
    assert "instructions" not in found
