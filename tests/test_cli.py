"""The command line: what it prints where, its exit codes, and what it says to bad input."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from fuzz_lab import Run

from hipfire_kernels import dispatch, families
from hipfire_kernels.archs import ARCHS
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.authoring.render import render
from hipfire_kernels.bench import ab
from hipfire_kernels.building import builder
from hipfire_kernels.building.toolchains import registry, sanitized
from hipfire_kernels.building.toolchains.host import HostToolchain
from hipfire_kernels.checking import numbers, oracle, parity
from hipfire_kernels.cli import _load, _select, app, generate
from hipfire_kernels.dispatch import policy
from hipfire_kernels.dispatch.routes import ROUTES, routes_of
from hipfire_kernels.errors import (
    CheckpointError,
    CompileError,
    DeadlockError,
    DeviceError,
    HipfireError,
    InputError,
    NotAdmitted,
    RenderError,
    ToolchainUnavailable,
)
from hipfire_kernels.model import Tokenizer, demo_pair_path, demo_prompts
from hipfire_kernels.model.attention import KV_FORMATS
from hipfire_kernels.model.convert import FORMATS
from hipfire_kernels.model.request import Speculation
from hipfire_kernels.running import binding

ROWS = "attention_flash_q8_0_rows"
ROWS8 = "attention_flash_q8_0_rows8_d8"
REDUCE = "attention_flash_reduce_batched_d1"


Hfk = Callable[..., Run]


@pytest.fixture
def hfk(capsys: pytest.CaptureFixture[str]) -> Hfk:
    """Run a command in this process, as `main` does."""

    def run(*args: str) -> Run:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            app(list(args), prog_name="hfk")
        seen = capsys.readouterr()
        return Run(int(ended.value.code or 0), seen.out, seen.err)

    return run


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which no toolchain finds anything."""
    for toolchain in registry.toolchains():
        monkeypatch.setattr(toolchain, "available", lambda arch: "not installed")


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


# ---- help and start-up -------------------------------------------------------------------------------------

COMMANDS = [
    "demo", "generate", "convert", "list", "render", "build", "isa", "diff", "watch", "lint", "sanitize", "parity",
    "fuzz", "replay", "bench", "ab", "firstlight", "evidence", "qualify", "tune", "report", "explain", "cache",
    "doctor",
]  # fmt: skip
"""All of them."""


@pytest.mark.parametrize(
    "command", [*COMMANDS, "cache ls", "cache verify", "cache clear", "cache path", "evidence add"]
)
def test_help_of_each_command(hfk: Hfk, command: str) -> None:
    run = hfk(*command.split(), "--help")
    assert run.code == 0
    assert run.out.startswith(f"Usage: hfk {command}")
    assert ("--json" in run.out) == (command != "watch")  # which does not end


def test_help_lists_every_command(hfk: Hfk) -> None:
    run = hfk("--help")
    assert all(f"\n  {command} " in run.out for command in COMMANDS)
    assert "Exit codes" in run.out


def test_version(hfk: Hfk) -> None:
    assert hfk("--version").out.startswith("hipfire-kernels 0.")


def test_help_imports_nothing_heavy() -> None:
    program = """
import sys
from hipfire_kernels.cli import _select, app, generate
try:
    app(["--help"])
except SystemExit:
    print(sorted({m.split(".")[0] for m in sys.modules} | set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for name in ("rich", "cffi", "tokenizers", "hipfire_kernels.dispatch", "hipfire_kernels.model"):
        assert f"'{name}'" not in done.stderr, name
    assert "'hipfire_kernels.cli.kernels'" in done.stderr


# ---- exit codes --------------------------------------------------------------------------------------------

CODES = [
    (InputError("x"), 2),
    (CheckpointError("x"), 2),
    (NotAdmitted("x"), 3),
    (ToolchainUnavailable("x"), 3),
    (DeviceError("x"), 3),
    (DeadlockError("x"), 1),
    (CompileError("x"), 1),
    (RenderError("x"), 1),
    (HipfireError("x"), 1),
]


@pytest.mark.parametrize(("error", "code"), CODES, ids=lambda value: type(value).__name__)
def test_an_error_becomes_a_message_and_a_code(
    hfk: Hfk, monkeypatch: pytest.MonkeyPatch, error: HipfireError, code: int
) -> None:
    def fail(*args: object) -> str:
        raise error

    monkeypatch.setattr(Variant, "source", fail)
    run = hfk("render", ROWS8, "--arch", "gfx1100")
    assert (run.code, run.out, run.err) == (code, "", "error: x\n")
    run = hfk("render", ROWS8, "--arch", "gfx1100", "--json")
    assert (run.code, run.err) == (code, "error: x\n")
    assert run.document == {"error": {"kind": type(error).__name__, "message": "x"}}


BAD_INPUT = [
    ("render nonsense --arch gfx1100", "no kernel family or variant is named 'nonsense'"),
    ("render attention_flash_q8_0_row8_d8 --arch gfx1100", f"did you mean .*{ROWS8}"),
    (f"render {ROWS} --arch gfx1100", f"4 variants; choose one with --param .*{ROWS8}"),
    (f"render {ROWS} --arch gfx1100 --param rows=8", r"2 variants.*head_dim \(128, 256\)"),
    (f"render {ROWS} --arch gfx1100 --param rows=5", "--param rows is '5'; legal: 4, 8"),
    (f"render {ROWS} --arch gfx1100 --param tile=1", "the KEY of --param is 'tile'; legal: rows, head_dim"),
    (f"render {ROWS} --arch gfx1100 --param rows", "--param is 'rows'; required: KEY=VALUE"),
    (f"render {ROWS8} --arch gfx1100 --param rows=8", "--param rows=8 with .* one variant already"),
    (f"render {ROWS8}", "Missing option '--arch'"),
    ("build --arch gfx1100", "no VARIANT is given"),
    (f"build {ROWS8} --all --arch gfx1100", "VARIANT and --all are both given"),
    (f"build {ROWS8} --arch gfx1100 --toolchain host", "toolchain 'host' does not build for gfx1100"),
    (f"build {ROWS8} --arch host --toolchain clang", "toolchain 'clang' does not build for host"),
    (f"build {ROWS8} --arch gfx1100 --against /nonexistent", "--against /nonexistent cannot be read"),
    ("parity", "no VARIANT is given"),
    (f"parity {REDUCE} --device auto --thread-order 3", "--thread-order with --device auto"),
    (f"parity {REDUCE} --thread-order x", "Invalid value for '--thread-order'"),
    ("explain", "Missing option '--arch'"),
    ("explain --arch gfx1100 --heads 24", "--heads is '24'; required: query heads / KV heads"),
    ("explain --arch gfx1100 --rows many", "Invalid value for '--rows'"),
    ("demo --index 99", r"--index is 99; the demo has the prompts 0 \.\. 10"),
    ("demo --kv-format f32 --block-size 99", "block_size is 99; legal are whole numbers from 1 to 16"),
    ("demo --kv-format f32 --no-draft --block-size 4", "block_size is 4, but this engine has no draft"),
    ("demo --kv-format f32 --max-new-tokens 0", "max_new_tokens is 0"),
    ("generate --prompt x --prompt-file y", "--prompt and --prompt-file are both given"),
    ("generate --prompt-file /nonexistent.txt", "--prompt-file /nonexistent.txt cannot be read"),
    ("generate --prompt-file /", "--prompt-file / cannot be read"),
    ("generate --prompt=", "--prompt is empty"),
    ("generate --prompt x --draft /nonexistent --no-draft", "--draft /nonexistent and --no-draft"),
    ("generate --prompt x --ngram --no-draft", "--no-draft and --ngram are given together"),
    ("demo --kv-format f32 --speculation on --no-draft", "speculation is 'on', but this engine has no draft"),
    ("generate --prompt x --temperature -1", "temperature is -1.0; legal are finite numbers from 0.0"),
    ("generate --prompt x --top-p 2", "top_p is 2.0; legal are numbers above 0.0"),
    ("generate --prompt x --min-new-tokens 200", "min_new_tokens is 200; legal are whole numbers from 0 to"),
    ("generate --prompt x --stop=", r"stop_strings is \[''\]; required: a sequence of texts, none of them empty"),
    ("generate --prompt x --target /nonexistent", "/nonexistent"),
    ("generate --prompt x --draft /nonexistent", "/nonexistent"),
    ("cache prune", "No such command 'prune'"),
]


@pytest.mark.parametrize(("line", "message"), BAD_INPUT, ids=[line for line, _ in BAD_INPUT])
def test_bad_input_is_refused_by_name(hfk: Hfk, monkeypatch: pytest.MonkeyPatch, line: str, message: str) -> None:
    """And before anything large is read."""

    def load(*args: object) -> None:
        raise AssertionError("loads a checkpoint")

    monkeypatch.setattr(_load, "target", load)
    monkeypatch.setattr(_load, "draft", load)
    run = hfk(*line.split())
    assert run.code == 2
    assert run.out == ""
    assert re.search(message, run.err), run.err
    assert "Traceback" not in run.err


# ---- options that take one of a few words --------------------------------------------------------------------------

ARCH, DEVICE = ("gfx1l51", "gfx1151"), ("hots", "host")
CHOICES: dict[str, dict[str, tuple[str, str]]] = {
    "demo": {"kv_format": ("q8", "q8_0"), "speculation": ("atuo", "auto")},
    "generate": {"kv_format": ("f23", "f32"), "speculation": ("of", "off")},
    "convert": {"wanted": ("mq44", "mq4")},
    "render": {"arch": ARCH},
    "bundle": {"arch": ARCH},
    "build": {"arch": ("gfx1201,gfx1l51", "gfx1151"), "toolchain": ("clagn", "clang")},
    "isa": {"arch": ("sm90", "sm_90"), "toolchain": ("hirptc", "hiprtc")},
    "diff": {"arch": ARCH, "device": DEVICE},
    "watch": {"arch": ("host,gfx1l51", "gfx1151"), "time": ("huda:0", "cuda:N"), "on": ("isa:gfx1210", "isa:gfx1201")},
    "sanitize": {"kind": ("adress", "address"), "device": ("isa:gfx1210", "isa:gfx1201")},
    "parity": {"device": DEVICE},
    "fuzz": {"device": ("host+undefind", "host+undefined")},
    "replay": {"device": ("hpi:0", "hip:N")},
    "bench": {"device": ("atuo", "auto")},
    "ab": {"device": DEVICE},
    "qualify": {"device": DEVICE, "route": ("row8", "rows8")},
    "firstlight": {"device": ("hpi:0", "hip:N"), "family": ("attention_verify_gqa", "attention_verify_gqa_q8")},
    "tune": {"device": DEVICE, "family": ("attention_verify_gqa", "attention_verify_gqa_q8")},
    "explain": {
        "arch": ARCH, "workload": ("verfy", "verify"), "kv_format": ("q80", "q8_0"), "layout": ("chian", "chain"),
    },
}  # fmt: skip
"""Commands, their options of a few words, something that is none of these, and the word that is meant by it."""

FREE = {
    "prompt", "prompt_file", "target", "draft", "stop", "system", "trace", "param", "against", "shard", "out",
    "ledger", "merge", "heads", "head_dim", "rows", "ctx", "kernel", "generate", "title",
    "extent", "again", "until",
}  # fmt: skip
"""Options for which any text may be legal: texts, numbers in lists, files, pairs of names."""


def options(command: str) -> dict[str, tuple[Any, Any]]:
    """Of each parameter of a command: its type, and what the command says of it to Typer."""
    found = next(c for c in app.registered_commands if (c.name or c.callback.__name__) == command)
    hints = get_type_hints(found.callback, include_extras=True)
    return {
        name: (hint.__origin__, hint.__metadata__[0]) for name, hint in hints.items() if hasattr(hint, "__metadata__")
    }


def flag(command: str, option: str) -> str:
    """As it is spelled."""
    info = options(command)[option][1]
    names = (info.default, *info.param_decls)  # Typer takes the first one for a default
    return next((n for n in names if isinstance(n, str)), f"--{option.replace('_', '-')}")


NAMES = [command.name or command.callback.__name__ for command in app.registered_commands]


@pytest.mark.parametrize("command", NAMES)
def test_every_option_of_a_few_words_is_known_here(command: str) -> None:
    texts = {
        name
        for name, (kind, info) in options(command).items()
        if isinstance(info, typer.models.OptionInfo) and {str, list[str]} & {kind, *get_args(kind)}
    }
    assert texts - FREE == set(CHOICES.get(command, {}))


@pytest.mark.parametrize(
    ("command", "option"), [(command, option) for command, words in CHOICES.items() for option in words]
)
def test_a_word_that_is_none_of_them(hfk: Hfk, command: str, option: str) -> None:
    wrong, meant = CHOICES[command][option]
    run = hfk(command, flag(command, option), wrong, *(["--json"] if "as_json" in options(command) else []))
    assert run.code == 2
    assert f"{flag(command, option)} is '{wrong.split(',')[-1]}'; did you mean {meant}? legal: " in run.err
    if "as_json" in options(command):
        assert run.document["error"]["kind"] == "InputError"


def test_words_of_options_are_those_of_the_library() -> None:
    def words(command: str, option: str) -> set[str]:
        return set(options(command)[option][1].metavar.split("|"))

    assert words("convert", "wanted") == set(FORMATS)
    assert words("demo", "kv_format") == words("generate", "kv_format") == set(KV_FORMATS)
    assert words("demo", "speculation") == words("generate", "speculation") == set(get_args(Speculation))
    assert words("sanitize", "kind") == {sanitized.UNDEFINED, sanitized.ADDRESS}
    assert words("explain", "workload") == {route.workload for route in ROUTES}


def test_a_word_that_is_one_of_them(hfk: Hfk) -> None:
    assert hfk("explain", "--arch", "gfx1100:sramecc-:xnack-").code == 0
    assert hfk("parity", REDUCE, "--device", "cuda:63").code == 3  # which is not there


# ---- files to write -------------------------------------------------------------------------------------------------

WRITERS = {
    "ab --out": "--kernel tile_batched rows8",
    "bench --out": "",
    "convert": "/nonexistent",
    "demo --trace": "",
    "generate --trace": "--prompt x",
    "qualify --out": "--device host",
    "report --out": "nothing.json",
    "tune --out": "--device host",
}


@pytest.mark.parametrize("line", WRITERS)
@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("nowhere/out", r"the folder \S+/nowhere does not exist; create it, or name another file"),
        ("file/out", r"the folder \S+/file is no folder"),
        ("folder", "is a folder; required: a file to write"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    hfk: Hfk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, file: str, says: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    command, _, flag = line.partition(" ")
    run = hfk(command, *WRITERS[line].split(), *filter(None, [flag]), file)
    assert run.code == 2
    assert re.match(rf"error: {flag or 'OUT'} {file} (cannot be written: )?{says}", run.err), run.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_every_option_for_a_file_to_write_is_known_here() -> None:
    found = {f"{name} --{option}" for name in NAMES for option in ("out", "trace") if option in options(name)}
    folders = {f"{name} --out" for name in ("bundle", "firstlight", "fuzz", "sanitize")}
    assert found - folders == {*WRITERS, "convert --out"} - {"convert"}


@pytest.mark.parametrize("command", ["fuzz --all", "sanitize --all", "bundle --arch gfx1100"])
def test_a_folder_for_failing_cases_that_cannot_be_made(hfk: Hfk, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").touch()
    run = hfk(*command.split(), "--out", str(tmp_path / "file" / "below" / "folder"))
    assert run.code == 2
    assert f"cannot be made in {tmp_path / 'file'}: it is no folder" in run.err


def test_a_result_is_printed_before_its_file_fails(hfk: Hfk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The disk may fill up while it works."""

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    result = {"judgement": "yes", "arms": {}}
    monkeypatch.setattr(ab, "run", lambda *args: result)
    monkeypatch.setattr(Path, "write_text", full)
    run = hfk("ab", "--kernel", "tile_batched", "rows8", "--out", str(tmp_path / "out"), "--json")
    assert run.code == 2
    assert "cannot be written (No space left on device)" in run.err
    assert '"judgement": "yes"' in run.out


def test_a_switch_that_does_not_parse(hfk: Hfk) -> None:
    with policy.override({"HIPFIRE_FA_PERTOKEN_MIN_CTX": "lots"}):
        run = hfk("explain", "--arch", "gfx1100")
    assert run.code == 2
    assert "HIPFIRE_FA_PERTOKEN_MIN_CTX='lots'" in run.err


def test_prompts_that_are_no_text(hfk: Hfk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    run = hfk("generate", "--prompt-file", str(tmp_path / "latin1"))
    assert run.code == 2
    assert "is not UTF-8 (unexpected end of data at byte 3)" in run.err
    stdin(monkeypatch, b"\xff")
    assert "stdin is not UTF-8" in hfk("generate").err
    stdin(monkeypatch, b"")
    assert "the prompt on stdin is empty" in hfk("generate").err


# ---- list, render ------------------------------------------------------------------------------------------


def test_list_names_every_variant_without_a_compiler(hfk: Hfk, no_compiler: None) -> None:
    shown = {family["family"]: family for family in hfk("list", "--json").document}
    assert list(shown) == list(families())
    entries = [v["entry"] for family in shown.values() for v in family["variants"]]
    assert entries == [v.entry for family in families().values() for v in family.variants()]
    assert shown[ROWS]["routes"] == ["rows8", "rows4"]
    assert shown["attention_flash_reduce_batched"]["unrouted"] == "the second launch of every tiled route"
    lines = hfk("list").out.splitlines()
    assert f"{ROWS}  (route rows8, rows4)" in lines
    assert [line.split() for line in lines if line.startswith(ROWS8)] == [[ROWS8, "8", "256", "32", "4096", "False"]]


@pytest.mark.parametrize("name", [(ROWS8,), (ROWS, "--param", "rows=8", "--param", "head_dim=256")], ids=len)
def test_render_prints_the_source_without_a_compiler(hfk: Hfk, no_compiler: None, name: tuple[str, ...]) -> None:
    source = render(families()[ROWS].variant(rows=8, head_dim=256), "gfx1201")
    assert hfk("render", *name, "--arch", "gfx1201").out == source
    shown = hfk("render", *name, "--arch", "gfx1201", "--json").document
    assert (shown["entry"], shown["arch"], shown["source"]) == (ROWS8, "gfx1201", source)


def test_a_name_of_both_a_family_and_a_variant(hfk: Hfk) -> None:
    name = "kv_cache_write_q8_0_batched"
    assert f"void {name}(" in hfk("render", name, "--arch", "host").out
    assert "void kv_cache_write_q8_0_pair_batched(" in hfk("render", name, "--param", "pair=true", "--arch", "host").out


# ---- build -------------------------------------------------------------------------------------------------


def test_build_reports_what_a_kernel_takes(hfk: Hfk) -> None:
    run = hfk("build", ROWS8, "attention_flash_q8_0_rows4_d8", "--arch", "gfx1100,gfx1201", "--json")
    assert run.code == 0
    kernels = run.document["kernels"]
    assert [(k["entry"][-8:], k["arch"]) for k in kernels] == [
        ("rows8_d8", "gfx1100"),
        ("rows4_d8", "gfx1100"),
        ("rows8_d8", "gfx1201"),
        ("rows4_d8", "gfx1201"),
    ]
    assert all(k["resources"]["vgprs"] > 0 and k["resources"]["scratch_bytes"] == 0 for k in kernels)
    assert run.document["failures"] == []
    assert "build 4/4" in run.err
    table = hfk("build", ROWS8, "--arch", "gfx1100").out.splitlines()
    assert table[0].startswith("gfx1100  (")
    assert table[2].split()[:2] == [ROWS8, str(kernels[0]["resources"]["vgprs"])]
    assert table[2].split()[-1] == "yes"


def test_a_family_stands_for_its_variants(hfk: Hfk) -> None:
    kernels = hfk("build", "kv_cache_write_q8_0_batched", "--arch", "host", "--json").document["kernels"]
    assert [k["params"]["pair"] for k in kernels] == [False, True]


def test_build_against_an_earlier_report(hfk: Hfk, tmp_path: Path) -> None:
    file = tmp_path / "earlier.json"
    build = ("build", ROWS8, "--arch", "gfx1100", "--against", str(file))
    report = hfk(*build[:4], "--json").document
    file.write_text(json.dumps(report))
    assert hfk(*build, "--json").document["changes"] == []
    assert f"nothing changed against {file}" in hfk(*build).out
    resources = report["kernels"][0]["resources"]
    vgprs, waves = resources["vgprs"], resources["occupancy"]
    resources.update(vgprs=vgprs - 1, occupancy=waves - 1)
    file.write_text(json.dumps(report))
    changes = hfk(*build, "--json").document["changes"]
    assert [(c["field"], c["before"], c["after"], c["verdict"]) for c in changes] == [
        ("vgprs", vgprs - 1, vgprs, "worse"),
        ("occupancy", waves - 1, waves, "better"),
    ]
    assert re.search(rf"{ROWS8} +gfx1100 +vgprs +{vgprs - 1} +{vgprs} +worse", hfk(*build).out)
    file.write_text(json.dumps({"kernels": []}))
    assert [c["verdict"] for c in hfk(*build, "--json").document["changes"]] == ["new"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kernels": [{}]}', '{"kernels": [{"resources": {"cats": 1}}]}'])
def test_against_no_report(hfk: Hfk, tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    run = hfk("build", ROWS8, "--arch", "gfx1100", "--against", str(tmp_path / "file"))
    assert run.code == 2
    assert f"--against {tmp_path / 'file'} is no report" in run.err


def test_build_fails_on_a_spill(hfk: Hfk, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = builder.build

    def spilling(*args: Any) -> builder.Artifact:
        artifact = honest(*args)
        return replace(artifact, resources=replace(artifact.resources, vgpr_spills=7, scratch_bytes=28))

    monkeypatch.setattr(builder, "build", spilling)
    run = hfk("build", ROWS8, "--arch", "gfx1100")
    assert run.code == 1
    assert f"error: {ROWS8} for gfx1100 spills: vgpr_spills 7, scratch_bytes 28" in run.err


def test_build_shows_the_source_that_does_not_compile(hfk: Hfk, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(variant: Variant, arch: str) -> str:
        return render(variant, arch) + ("int broken = nonsense;\n" if variant.entry == ROWS8 else "")

    monkeypatch.setattr(Variant, "source", broken)
    run = hfk("build", ROWS8, "kv_cache_write_q8_0_pair_batched", "--arch", "gfx1100", "--json")
    assert run.code == 1
    assert [k["entry"] for k in run.document["kernels"]] == ["kv_cache_write_q8_0_pair_batched"]
    assert [f["entry"] for f in run.document["failures"]] == [ROWS8]
    marked = [line for line in run.err.splitlines() if line.startswith(">")]
    assert len(marked) == 1
    assert re.match(r"> +\d+ \| int broken = nonsense;", marked[0])


def test_build_without_a_compiler_is_refused(
    hfk: Hfk, no_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIPFIRE_CACHE_DIR", str(tmp_path))  # nothing was built before
    run = hfk("build", ROWS8, "--arch", "gfx1100")
    assert run.code == 3
    assert "clang: not installed" in run.err
    assert run.out == ""


# ---- parity ------------------------------------------------------------------------------------------------


def test_parity_reports_the_worst_error(hfk: Hfk) -> None:
    run = hfk("parity", REDUCE, "attention_flash_q8_0_rows4_d4", "--quick", "--json")
    assert run.code == 0
    merge, rows = run.document["variants"]
    assert (merge["variant"], merge["twin"]) == (REDUCE, None)
    assert (rows["variant"], rows["twin"]) == ("attention_flash_q8_0_rows4_d4", 0.0)
    assert merge["cases"] == rows["cases"] > 40
    assert 0 < merge["worst"] <= merge["limit"] == 1e-5
    assert "parity 2/2" in run.err
    assert "1 variants, 51 cases, 0 failures" in hfk("parity", REDUCE, "--quick", "--thread-order", "7").out


def test_parity_prints_the_limit_that_was_applied(hfk: Hfk) -> None:
    """The KV write is held to one quantisation step, not to a relative error."""
    reports = hfk("parity", "kv_cache_write_q8_0_batched", REDUCE, "--quick", "--json").document["variants"]
    assert [r["limit"] for r in reports] == [1.0, 1.0, 1e-5]
    assert all(r["worst"] <= r["limit"] for r in reports)


def test_parity_fails_on_a_faulty_launch(hfk: Hfk, monkeypatch: pytest.MonkeyPatch) -> None:
    family = families()["attention_flash_reduce_batched"]

    def one_short(variant: Variant, symbols: Any) -> tuple[int, int, int]:
        x, y, z = family.grid(variant, symbols)
        return x, y - 1, z

    monkeypatch.setattr(_select, "families", lambda: {family.name: replace(family, grid=one_short)})
    run = hfk("parity", REDUCE, "--quick")
    assert run.code == 1
    assert re.search(
        rf"FAILED {REDUCE} B1-ctx1-h2/2-d32-normal-seed\d+: .* nan at row 0, head 1, dim 0, where", run.out
    )
    assert "1 variants, 51 cases, 51 failures" in run.out
    failed = hfk("parity", REDUCE, "--quick", "--json").document["variants"][0]
    assert failed["worst"] is None
    assert len(failed["failures"]) == 51


def test_parity_keeps_the_worst_of_all_cases(hfk: Hfk, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([1e-7, 3e-6, 1e-7, *[0.0] * 100])
    orders = set()

    def check(variant: Variant, case: parity.Case, device: Any) -> parity.Result:
        orders.add(device.thread_order)
        return parity.Result(variant, case, next(errors), 1e-5)

    monkeypatch.setattr(oracle, "check", check)
    run = hfk("parity", REDUCE, "--quick", "--thread-order", "7", "--json")
    assert (run.code, run.document["variants"][0]["worst"]) == (0, 3e-6)
    assert orders == {7}


def test_parity_holds_multirow_to_the_established_kernel(hfk: Hfk, monkeypatch: pytest.MonkeyPatch) -> None:
    """5e-6 is good enough against the oracle, not against the kernel that does the same arithmetic."""
    monkeypatch.setattr(numbers, "worst_row", lambda got, want: 5e-6)
    run = hfk("parity", "attention_flash_q8_0_rows4_d4", "--quick")
    assert run.code == 1
    assert "5e-06 from attention_flash_q8_0_tile_batched_d4 (limit 1e-06)" in run.out


def test_parity_survives_a_deadlock(hfk: Hfk, monkeypatch: pytest.MonkeyPatch) -> None:
    def deadlock(*args: object) -> parity.Result:
        raise DeadlockError("threads wait for each other")

    monkeypatch.setattr(oracle, "check", deadlock)
    run = hfk("parity", REDUCE, "--quick", "--json")
    assert run.code == 1
    (report,) = run.document["variants"]
    assert report["worst"] is None
    assert report["failures"][0].endswith(": threads wait for each other")


# ---- explain -----------------------------------------------------------------------------------------------


def test_explain_an_admitted_request(hfk: Hfk) -> None:
    run = hfk("explain", "--arch", "gfx1100")
    assert run.code == 0
    lines = run.out.splitlines()
    names = [route.name for route in routes_of("verify")]
    assert lines[0].split() == ["check", "request", *names]
    assert ["rows", "16", *("ok" for _ in names)] in [line.split() for line in lines]
    assert "route: rows8" in lines
    assert hfk("explain", "--arch", "gfx1100", "--json").document["route"] == "rows8"


def test_explain_says_why_not(hfk: Hfk) -> None:
    line = "explain --arch gfx1201 --rows 5 --ctx 100 --layout tree --capturing --recording --window 7"
    decision = hfk(*line.split(), "--json").document
    assert decision["route"] == "tile_batched"
    failed = {c["name"] for c in decision["checks"]["rows8"] if not c["ok"]}
    assert failed == {"layout", "rows", "window", "capturing", "recording", "logical_ctx", "evidence"}
    run = hfk(*line.split())
    names = [route.name for route in routes_of("verify")]
    found = ["NO" if name == "rows8" else "ok" for name in names]
    assert ["rows", "5", *found] in [row.split() for row in run.out.splitlines()]
    assert "  rows: 5, required 8 .. 32" in run.out.splitlines()


def test_explain_a_draft(hfk: Hfk) -> None:
    decision = hfk("explain", "--arch", "host", "--workload", "draft", "--causal", "--json").document
    assert decision["route"] == "dflash_sliding"
    assert decision["request"]["head_dim"] == 128


@pytest.mark.parametrize("wrong", ["--arch gfx1100 --kv-format f32", "--arch all --head-dim 100"])
def test_explain_exits_with_3_if_nothing_may_run(hfk: Hfk, wrong: str) -> None:
    run = hfk("explain", *wrong.split())
    assert run.code == 3
    assert "none" in run.out


def test_explain_all_exits_with_0_if_one_arch_may_run(hfk: Hfk, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = dispatch.admit
    monkeypatch.setattr(dispatch, "admit", lambda r: honest(r if r.arch == "host" else replace(r, kv_format="none")))
    assert hfk("explain", "--arch", "all").code == 0
    assert hfk("explain", "--arch", "gfx1100").code == 3


def test_explain_all_archs(hfk: Hfk) -> None:
    rows = [line.split()[:2] for line in hfk("explain", "--arch", "all").out.splitlines()[1:]]
    assert [arch for arch, _ in rows] == list(ARCHS)
    assert dict(rows)["gfx1100"] == "rows8"
    assert dict(rows)["gfx1201"] == "tile_batched"
    assert len(hfk("explain", "--arch", "all", "--json").document) == len(ARCHS)


# ---- cache, doctor -----------------------------------------------------------------------------------------


def test_cache_commands(hfk: Hfk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HIPFIRE_CACHE_DIR", str(tmp_path))
    assert hfk("cache", "--json").document == {"path": str(tmp_path), "kernels": 0, "bytes": 0}
    assert hfk("cache", "path").out == f"{tmp_path}\n"
    assert hfk("cache", "--json", "path").document == {"path": str(tmp_path)}
    assert hfk("cache", "path", "--json").document == {"path": str(tmp_path)}
    assert hfk("cache", "ls", "--json").document == []
    hfk("build", REDUCE, "--arch", "gfx1100")
    (entry,) = hfk("cache", "ls", "--json").document
    assert (entry["entry"], entry["arch"], entry["toolchain"]) == (REDUCE, "gfx1100", "clang")
    assert f"1 kernels in {tmp_path}" in hfk("cache", "ls").out
    found = hfk("cache", "--json").document
    assert (found["kernels"], found["bytes"]) == (1, sum(p.stat().st_size for p in tmp_path.rglob("*.*")))
    assert hfk("cache").out.startswith(f"1 kernels, {found['bytes'] / 1e6:.1f} MB in {tmp_path}; ")
    assert hfk("cache", "verify", "--json").document == {"path": str(tmp_path), "unsound": []}
    (file,) = (tmp_path / "artifacts").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    run = hfk("cache", "verify")
    assert run.code == 1
    assert f"{file} is truncated" in run.out
    assert hfk("cache", "clear", "--json").document == {"path": str(tmp_path), "removed": 1}
    assert "removed 0 kernels" in hfk("cache", "clear").out


def test_doctor(hfk: Hfk) -> None:
    with policy.override({"HIPFIRE_FA_PERTOKEN_MIN_CTX": "-1"}):
        run = hfk("doctor", "--json")
        text = hfk("doctor").out
    assert run.code == 0
    found = run.document
    chosen = {arch: group["chosen"] for group in found["compilers"] for arch in group["archs"]}
    assert (chosen["gfx1100"], chosen["host"]) == ("clang", "host")
    assert {"hiprtc", "clang"} <= {c["toolchain"] for c in found["compilers"][0]["candidates"]}
    assert all(c["why"] for group in found["compilers"] for c in group["candidates"])
    switch = found["switches"][0]
    assert (switch["name"], switch["value"]) == ("HIPFIRE_FA_PERTOKEN_MIN_CTX", "-1")
    assert "4096" in switch["default"]
    assert "would widen" in switch["problem"]
    assert [switch["name"] for switch in found["switches"]] == [switch.name for switch in policy.SWITCHES]
    assert "  chosen  clang: " in text
    assert "problem: HIPFIRE_FA_PERTOKEN_MIN_CTX='-1' would widen" in text


def test_doctor_without_a_compiler(hfk: Hfk, no_compiler: None) -> None:
    run = hfk("doctor", "--json")
    assert run.code == 0
    assert {group["chosen"] for group in run.document["compilers"]} == {None}


# ---- demo, generate ----------------------------------------------------------------------------------------


def test_demo_in_json(hfk: Hfk) -> None:
    run = hfk("demo", "--kv-format", "f32", "--no-adaptive-b", "--json")
    assert run.code == 0
    found = run.document
    assert round(found["tau"], 3) == 1.442
    assert found["acceptance_length"] == found["tau"] + 1
    assert (len(found["tokens"]), found["stop_reason"]) == (128, "length")
    assert sum(found["produced"]) + 1 == 128
    assert len(found["produced"]) == found["cycles"]
    assert found["routes"] == {"numpy": 4 * found["cycles"] + 2}
    assert found["tokens_per_second"] * found["decode_seconds"] == pytest.approx(127)
    assert run.err.startswith("loading the demo pair")


def test_demo_speculates_in_every_cycle_unless_told_otherwise(hfk: Hfk, tmp_path: Path) -> None:
    short = ("demo", "--kv-format", "f32", "--max-new-tokens", "40", "--json")
    adaptive, fixed = hfk(*short).document, hfk(*short, "--no-adaptive-b").document
    auto = hfk(*short, "--speculation", "auto", "--trace", str(tmp_path / "trace")).document
    off, ngram = hfk(*short, "--speculation", "off").document, hfk(*short, "--ngram").document
    assert adaptive["tokens"] == fixed["tokens"] == auto["tokens"] == off["tokens"] == ngram["tokens"]
    assert sum(adaptive["block_sizes"].values()) >= adaptive["cycles"] - 1
    assert "16" not in adaptive["block_sizes"]
    assert fixed["block_sizes"]["16"] > 5
    assert (auto["retired_cycles"], auto["probes"]) != (0, 0)
    assert len((tmp_path / "trace").read_text().splitlines()) == auto["cycles"] + 2
    assert (off["cycles"], off["routes"]) == (39, {"numpy": 80})
    assert sum(ngram["routes"].values()) == 2 * (1 + ngram["cycles"])  # no draft attention


def test_a_draft_that_cannot_be_loaded_is_left_only_where_auto_is_asked_for(hfk: Hfk) -> None:
    command = ("generate", "--prompt", "import os\n", "--kv-format", "f32", "--max-new-tokens", "5", "--json")
    missing = (*command, "--draft", "/nonexistent")
    assert hfk(*missing, "--speculation", "on").code == 2
    run = hfk(*missing, "--speculation", "auto")
    assert run.code == 0
    assert "/nonexistent" in run.document["fallback"]
    assert run.document["tokens"] == hfk(*command, "--no-draft").document["tokens"]


def test_demo_says_what_it_compiles_before_it_is_compiled(
    hfk: Hfk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def compile_(self: HostToolchain, source: str, arch: Any, extra: Any = ()) -> Any:
        said.append(capsys.readouterr().err)
        raise CompileError("enough")

    monkeypatch.setenv("HIPFIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(HostToolchain, "compile", compile_)
    binding.kernel.cache_clear()
    assert hfk("demo", "--max-new-tokens", "2").code == 1
    binding.kernel.cache_clear()
    assert said[0].endswith("\ncompiling kv_cache_write_q8_0_pair_batched for host\n")
    hfk("list")
    assert builder.log.handlers == []


def test_demo_prints_prompt_text_and_figures(hfk: Hfk) -> None:
    run = hfk("demo", "--index", "1", "--max-new-tokens", "12")
    assert run.code == 0
    text = hfk("demo", "--index", "1", "--max-new-tokens", "12", "--json").document["text"]
    assert run.out.startswith(demo_prompts()[1] + text + "\n\ntokens             12 (length)\n")
    names = [re.split("  +", line)[0] for line in run.out.splitlines()[-10:]]
    assert names[:6] == ["tokens", "tokens/s", "tau", "acceptance length", "cycles", "routes"]
    assert names[6:] == ["prefill", "refused", "verify graph", "verified rows"]
    assert re.search(r"routes +tile_batched x \d+, dflash_scalar x \d+", run.out)
    assert re.search(r"refused .*rows8: rows x \d+", run.out)
    assert re.search(r"verify graph +direct x \d+", run.out)


def test_generate_takes_its_prompt_from_anywhere(hfk: Hfk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    short = ("--kv-format", "f32", "--max-new-tokens", "8", "--json")
    prompt = "import os\n\ndef é"
    (tmp_path / "prompt").write_text(prompt, encoding="utf-8")
    tokens = hfk("generate", "--prompt", prompt, *short).document["tokens"]
    assert len(tokens) == 8
    assert hfk("generate", "--prompt-file", str(tmp_path / "prompt"), *short).document["tokens"] == tokens
    stdin(monkeypatch, prompt.encode())
    assert hfk("generate", *short).document["tokens"] == tokens
    folder = demo_pair_path()
    pair = ("--target", str(folder / "target"), "--draft", str(folder / "draft"))
    named = hfk("generate", "--prompt", prompt, *pair, *short, "--speculation", "on").document
    assert named["tokens"] == tokens
    assert named["cycles"] < 7
    for plain in [("--no-draft",), ("--block-size", "1"), pair[:2]]:
        found = hfk("generate", "--prompt", prompt, *plain, *short).document
        assert (found["tokens"], found["cycles"], found["tau"]) == (tokens, 7, 0.0)


def test_text_comes_as_it_is_accepted(hfk: Hfk, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    class Watched(io.StringIO):
        def flush(self) -> None:
            written.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Watched())
    hfk("generate", "--prompt", "import os\n", "--kv-format", "f32", "--max-new-tokens", "16")
    assert len(set(written)) > 5


def test_text_that_ends_inside_a_character() -> None:
    tokenizer = Tokenizer(demo_pair_path() / "target")
    first = tokenizer.encode("\U0001f600")[0]
    pieces, _, _ = generate._drain(iter([[first]]), tokenizer, silent=True)
    assert "".join(pieces) == "\ufffd"


@pytest.mark.parametrize("line", ["list", f"render {ROWS8} --arch host", "doctor", "cache verify"])
def test_nothing_but_the_document_is_on_stdout(hfk: Hfk, line: str) -> None:
    run = hfk(*line.split(), "--json")
    assert run.code == 0
    assert run.document
    assert run.err == ""
