"""Another build in a kernel's place, revisions, `hfk diff`, `hfk isa` and `hfk watch`."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tree_lab import Tree

from hipfire_kernels import cli, compare, families, outline, revision
from hipfire_kernels.builder import Artifact, build
from hipfire_kernels.errors import InputError
from hipfire_kernels.family import Variant
from hipfire_kernels.parity import Case
from hipfire_kernels.runtime import Device
from hipfire_kernels.runtime.host import HostDevice

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
        "hipfire_kernels/kernels.py", "grid=_draft_grid,", "grid=lambda v, s: (s.n_heads, s.rows, 1 + 0 * s.rows),"
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
        assert "parity of A on host: 15 cases, none wrong" in done.stdout
        assert "parity of B on host: 15 cases, 12 wrong" in done.stdout
        assert "time: not taken: one of the two is wrong" in done.stdout

    def test_a_revision_with_another_launch_is_not_run(self, committed: Tree) -> None:
        done = committed.hfk("diff", "attention_dflash_f32_d4@HEAD", "attention_dflash_f32_d4")
        assert done.returncode == 0, done.stderr
        assert "source: the same" in done.stdout
        assert "parity of A on host: not run: its arguments, LDS or grid are declared otherwise" in done.stdout
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


# ---- watching -------------------------------------------------------------------------------------------------------


class Watching:
    """A running `hfk watch`."""

    def __init__(self, tree: Tree, *arguments: str) -> None:
        self.tree = tree
        self.process = subprocess.Popen(
            tree.command("watch", *arguments), cwd=tree.root, env=tree.env, stdout=subprocess.PIPE, text=True
        )
        self.limit = threading.Timer(60, self.process.kill)  # a line that never comes is a failure, not a hang
        self.limit.start()
        self.said = self.until("s\n\n")

    def until(self, end: str) -> str:
        """What it prints next, to the end of a turn."""
        assert self.process.stdout is not None
        text = ""
        while not text.endswith(end):
            line = self.process.stdout.readline()
            assert line, text
            text += line
        return text

    def save(self, file: str, old: str, new: str) -> str:
        self.tree.edit(file, old, new)
        return self.until("s\n\n")


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    running = Watching(Tree(tmp_path), ROWS8.entry, "--arch", "gfx1100,gfx1201", "--time", "host")
    yield running
    running.limit.cancel()
    running.process.kill()
    running.process.wait()


def test_watch(watching: Watching) -> None:
    assert "good     ready: 1 of the variants watched" in watching.said
    said = watching.save(ROWS_TEMPLATE, "if (most == 0) return;", "if (most == 0) return\n;")
    assert "+    if (most == 0) return" in said
    assert f"time     {ROWS8.entry}: " in said
    assert "good     saved attention_flash_q8_0_rows.hip.j2" in said
    assert "takes" not in said

    said = watching.save(ROWS_TEMPLATE, "float acc[ROWS][DIMS] = {};", "float acc[ROWS][DIMS] = {{ nothing }};")
    assert (
        "FAILED   host attention_flash_q8_0_rows8_d4: attention_flash_q8_0_rows.hip.j2: 'nothing' is undefined" in said
    )
    assert "NOT GOOD" in said
    said = watching.save(ROWS_TEMPLATE, "{{ nothing }}", "nothing")
    assert "FAILED   gfx1201" in said
    assert "undeclared identifier 'nothing'" in said
    said = watching.save(ROWS_TEMPLATE, "acc[ROWS][DIMS] = nothing;", "acc[ROWS][DIMS] = {}; acc[0][0] = 1;")
    assert "parity   host, 15 cases: " in said
    assert "FAILED   host attention_flash_q8_0_rows8_d4: FAILED" in said
    assert "time  " not in said

    wide = "acc[ROWS][DIMS] = {}; float more[96]; for (int i = 0; i < 96; ++i) more[i] = q[i * n_heads]; block_sync();"
    end = "if (count[r] == 0) continue;"
    watching.tree.edit(
        ROWS_TEMPLATE, end, f"{end} if (n_heads < 0) for (int i = 0; i < 96; ++i) partials[i] = more[i];"
    )
    said = watching.save(ROWS_TEMPLATE, "acc[ROWS][DIMS] = {}; acc[0][0] = 1;", wide)
    while "takes" not in said:  # the two edits may have been seen one by one
        said = watching.until("s\n\n")
    assert "takes    gfx1100 attention_flash_q8_0_rows8_d4: VGPR 72 -> " in said
    assert "(worse)" in said
    watching.process.send_signal(signal.SIGINT)
    assert watching.process.wait(10) == 0


def test_saves_are_seen_when_the_file_is_replaced(tmp_path: Path) -> None:
    """An editor writes a new file and renames it over the old one; what it leaves beside it is no template."""
    tree = Tree(tmp_path)
    program = """
from hipfire_kernels.watch import saves, stamps
known = stamps()
print("ready", flush=True)
print(next(saves(known)), flush=True)
"""
    running = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tree.root, env=tree.env, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    (tree.root / "templates" / "softmax.h~").write_text("backup")
    new = tree.root / "templates" / ".softmax.h.swp"
    new.write_text((tree.root / "templates" / "softmax.h").read_text() + "// saved\n")
    new.rename(tree.root / "templates" / "softmax.h")
    assert running.stdout.readline() == "['softmax.h']\n"
    assert running.wait(10) == 0
