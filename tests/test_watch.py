"""`hfk watch`: what each save of a template did, and which variants stand for all."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from budget import some
from mutants import GQA, MUTANTS, N64, ROWS, TILE_BATCHED, Mutant, _mutated_environment
from tree_lab import Tree

from hipfire_kernels import families
from hipfire_kernels.authoring import templates
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.inspecting import outline, watch_child
from hipfire_kernels.inspecting.watch import Watch

ROWS8 = families()[ROWS].variant(rows=8, head_dim=128)
ROWS_TEMPLATE = f"templates/{ROWS}.hip.j2"
MMA = "attention_verify_mma_q8"


def few(family: str) -> list[Variant]:
    return outline.few({v: [v.source("host")] for v in families()[family].variants()})


class TestWhichStandForAll:
    @pytest.mark.parametrize("family", list(families()))
    def test_together_they_have_every_line(self, family: str) -> None:
        def lines(variant: Variant) -> set[str]:
            entry = re.sub(r"\d+", "#", variant.entry)
            return {line for line in outline.outline(variant.source("host")).splitlines() if entry not in line}

        every, chosen = list(families()[family].variants()), few(family)
        assert set[str]().union(*map(lines, every)) == set[str]().union(*map(lines, chosen))
        assert len(chosen) <= len(outline.groups(every, "host"))

    def test_not_every_combination(self) -> None:
        chosen, every = few(N64), list(families()[N64].variants())
        assert len(chosen) < len(every) == 4
        assert {v.kv for v in chosen} == {"f32", "f16"}
        assert {v.sliding for v in chosen} == {True, False}

    def test_a_number_that_chooses_a_branch_is_none_to_mask(self) -> None:
        assert {v.terms for v in few(MMA)} == {1, 2}


PLANTED = ("split skips a step", "keys not waited for", "record before the window unwritten")
FAULTS = [
    *(m for m in MUTANTS if m.name in PLANTED),
    Mutant("hidden step", MMA, {}, "verify_mma_wave.h.j2", "max_f32(old[c], max_f32(low, high))", "max_f32(low, high)"),
]


class TestTurns:
    def edit(self, monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
        """As if a template had been saved, on top of what is edited already."""
        environment = _mutated_environment(mutant)
        monkeypatch.setattr(templates, "_environment", lambda folder: environment)

    def test_of_each_large_family(self) -> None:
        assert sorted(m.family for m in FAULTS) == sorted([GQA, MMA, N64, TILE_BATCHED])

    @pytest.mark.parametrize("fault", some(FAULTS, 2), ids=lambda m: m.family)
    def test_a_fault_is_found(self, fault: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
        looking = Watch([list(families()[fault.family].variants())], [])
        assert looking.turn().good
        self.edit(monkeypatch, fault)
        turn = looking.turn()
        assert turn.changed
        assert not turn.good
        assert {variant for variant, _, _ in turn.failures} <= set(turn.checked)

    def test_a_branch_that_none_of_the_few_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is built, held against what it was before, and wrong until it is right."""
        tile = families()[TILE_BATCHED]
        small = tile.variant(head_dim=32, mask="tree")
        looking = Watch([list(tile.variants())], ["gfx1100"])
        assert small not in looking.turn().checked
        template, old = f"{TILE_BATCHED}.hip.j2", "    float acc[DIMS] = {};\n"
        first = '{% if mask == "tree" and head_dim == 32 %}\n    if (n_heads < 0) record[0] = 0.0f;\n{% endif %}\n'
        self.edit(monkeypatch, Mutant("", TILE_BATCHED, {}, template, old, first + old))
        turn = looking.turn()
        assert (turn.good, turn.changed, turn.checked) == (True, [small], [small])
        assert "code_bytes" in {change.field for _, _, change in turn.changes}

        self.edit(
            monkeypatch, Mutant("", TILE_BATCHED, {}, template, "(n_heads < 0) record[0] = 0", "(true) sum[0] += 1")
        )
        assert not looking.turn().good
        assert not looking.turn().good
        self.edit(
            monkeypatch, Mutant("", TILE_BATCHED, {}, template, "(true) sum[0] += 1", "(n_heads < 0) record[0] = 0")
        )
        turn = looking.turn()
        assert (turn.good, turn.changed) == (True, [])

    @pytest.mark.parametrize(
        ("planted", "says"),
        [
            ("*(volatile float*)8 = 1.0f;", "writes through a null pointer"),
            ("__builtin_abort();", "crashes, SIGABRT: "),
            ("for (volatile int i = 0; i < 1;) {}", "hangs, no answer within 2 s of CPU time: "),
        ],
        ids=["fault", "crash", "hang"],
    )
    def test_what_takes_its_process_with_it(self, planted: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(watch_child, "LIMIT_S", 2.0)
        start = "    const int head = block_x(), tile = block_y();\n"
        looking = Watch([[ROWS8]], [])
        assert looking.turn().good
        self.edit(monkeypatch, Mutant("", ROWS, {}, f"{ROWS}.hip.j2", start, f"{start}    {planted}\n"))
        ((_, arch, message),) = looking.turn().failures
        assert arch == "host"
        assert says in message
        self.edit(monkeypatch, Mutant("", ROWS, {}, f"{ROWS}.hip.j2", f"    {planted}\n", "    ;\n"))
        assert looking.turn().good

    def test_a_template_that_cannot_be_rendered_is_one_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tile = families()[TILE_BATCHED]
        looking = Watch([list(tile.variants())], [])
        self.edit(
            monkeypatch, Mutant("", TILE_BATCHED, {}, f"{TILE_BATCHED}.hip.j2", "{{ lds.scores }}", "{{ nothing }}")
        )
        (failure,) = looking.turn().failures
        assert "'nothing' is undefined" in failure[2]


# ---- the command ----------------------------------------------------------------------------------------------------


class Edited(Protocol):
    """A folder with templates: how `hfk` runs there, and how one is edited."""

    root: Path
    env: dict[str, str]

    def command(self, *arguments: str) -> list[str]: ...

    def edit(self, file: str, old: str, new: str) -> None: ...


class Watching:
    """A running `hfk watch`."""

    def __init__(self, tree: Edited, *arguments: str) -> None:
        self.tree = tree
        self.process = subprocess.Popen(
            tree.command("watch", *arguments), cwd=tree.root, env=tree.env, stdout=subprocess.PIPE, text=True
        )
        self.limit = threading.Timer(600, self.process.kill)  # a line that never comes is a failure, not a hang
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

    def close(self) -> None:
        self.limit.cancel()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    running = Watching(Tree(tmp_path), ROWS8.entry, "--arch", "gfx1100,gfx1201", "--time", "host")
    yield running
    running.close()


def test_watch(watching: Watching) -> None:
    assert "good     ready: 1 of the variants watched" in watching.said
    assert f"checked  {ROWS8.entry}\n" in watching.said
    said = watching.save(ROWS_TEMPLATE, "if (most == 0) return;", "if (most == 0) return\n;")
    assert "+    if (most == 0) return" in said
    assert f"time     {ROWS8.entry}: " in said
    assert "good     saved attention_flash_q8_0_rows.hip.j2" in said
    assert "takes" not in said

    # Another order of the records: right only where the reducer is compiled anew as well.
    said = watching.save("templates/partials.h.j2", "n_heads + head)", "n_heads + n_heads - 1 - head)")
    assert "good     saved partials.h.j2" in said

    said = watching.save(ROWS_TEMPLATE, "float acc[ROWS][DIMS] = {};", "float acc[ROWS][DIMS] = {{ nothing }};")
    failed = r"FAILED   gfx1100 attention_flash_q8_0_rows8_d4: attention_flash_q8_0_rows\.hip\.j2:\d+: 'nothing' is"
    assert re.search(failed, said)
    assert "NOT GOOD" in said
    said = watching.save(ROWS_TEMPLATE, "{{ nothing }}", "nothing")
    assert "FAILED   gfx1201" in said
    assert "undeclared identifier 'nothing'" in said
    said = watching.save(ROWS_TEMPLATE, "acc[ROWS][DIMS] = nothing;", "acc[ROWS][DIMS] = {}; acc[0][0] = 1;")
    assert "parity   host, 21 cases: " in said
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
    assert watching.process.wait() == 130


def test_saves_are_seen_when_the_file_is_replaced(tmp_path: Path) -> None:
    """An editor writes a new file and renames it over the old one; what it leaves beside it is no template."""
    tree = Tree(tmp_path)
    program = """
from hipfire_kernels.inspecting.watch import folders, saves, stamps
places = folders([])
known = stamps(places)
print("ready", flush=True)
print(next(saves(places, known)), flush=True)
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
    assert running.wait() == 0
