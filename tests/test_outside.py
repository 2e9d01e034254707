"""Kernels of somebody else: declared anywhere, refused where they are wrong, found by name, checked like ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_watch import Watching

import hipfire_kernels as hk
from hipfire_kernels import InputError, KernelFamily, Lds, ParityError, Scalar, Tensor, Tolerance
from hipfire_kernels.authoring.registry import REGISTRY, Registry
from hipfire_kernels.building import bundle
from hipfire_kernels.checking.declared import difference
from hipfire_kernels.checking.oracle import oracle_of
from hipfire_kernels.testing.axes import WORK, RandomSource

PACKAGE = Path(__file__).parent / "outside"

BODY = """{{ signature }} {
    for (int i = lane(); i < {{ width }}; i += 32) x[(long long)block_x() * {{ width }} + i] *= factor;
}
"""


def scale_rows(**changes: Any) -> KernelFamily:
    given: dict[str, Any] = {
        "name": "scale_rows",
        "doc": "one row",
        "params": {"width": (64, 96)},
        "entry": lambda v: f"scale_rows_w{v.width}",
        "args": lambda v: (Tensor("x", "f32", ("rows", v.width), writes=True, reads=True), Scalar("factor", "f32")),
        "grid": lambda v, s: (s.rows, 1, 1),
        "body": BODY,
        "reference": lambda x, factor: x.astype(float) * factor,
        "tolerance": Tolerance(1e-6),
        **changes,
    }
    return KernelFamily(**given)


@pytest.fixture
def registered() -> Iterator[KernelFamily]:
    family = hk.register(scale_rows())
    yield family
    REGISTRY.remove(family.name)


# ---- declared -------------------------------------------------------------------------------------------------------


def two(name: str) -> Any:
    return lambda v: (Tensor("x", "f32", ("rows", 64), writes=True), Scalar(name, "f32"), Scalar(name, "f32"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a name with a space": ({"name": "scale rows"}, "a family is named 'scale rows'; required: letters"),
    "a missing template": ({"body": None}, r"there is no template scale_rows\.hip\.j2 in .*; write it, or"),
    "another missing template": ({"body": None, "template": Path("/none/x.j2")}, r"no template x\.j2 in /none"),
    "a template and a body": ({"template": Path("/none/x.j2")}, "has a template and a body"),
    "an unknown oracle": ({"reference": None, "oracle": "attend"}, "oracle 'attend' is not known"),
    "an oracle of no module": ({"reference": None, "oracle": "no.such:ORACLE"}, "'no.such:ORACLE' is not known"),
    "a reference and an oracle": ({"oracle": "hipfire_kernels.testing.oracles:ATTEND"}, "are both given"),
    "a reference of other names": ({"reference": lambda y: y}, "its reference takes y, which is no argument"),
    "arguments of one name": ({"args": two("factor")}, "two arguments are named factor"),
    "an unknown dtype": (
        {"args": lambda v: (Tensor("x", "f31", ("n",), writes=True),)},
        "dtype 'f31'; required: one of",
    ),
    "scalars ahead of tensors": (
        {"args": lambda v: (Scalar("n", "i32"), Tensor("x", "f32", ("n",), writes=True))},
        "its arguments are n, x; required: its tensors, then",
    ),
    "nothing written": ({"args": lambda v: (Tensor("x", "f32", ("rows", 64)),)}, "no argument has writes=True"),
    "an extent of zero": ({"args": lambda v: (Tensor("x", "f32", ("rows", 0), writes=True),)}, "an extent 0"),
    "a parameter without values": ({"params": {"width": ()}}, "parameter width has no value"),
    "a parameter that hides what every variant has": (
        {"params": {"width": (64, 96), "threads": (64,)}},
        "a parameter is named 'threads', which is a name of every variant",
    ),
    "a parameter that hides what every template has": (
        {"params": {"width": (64, 96), "block": (64,)}},
        "a parameter is named 'block', which is a name that every template has",
    ),
    "a parameter that is no tuple": ({"params": {"width": 64}}, "parameter width has 64; required: a tuple"),
    "one entry for two variants": ({"entry": lambda v: "same"}, "width=64 and width=96 have one entry, same"),
    "an entry that is no identifier": ({"entry": lambda v: f"scale-{v.width}"}, "entry of width=64 is 'scale-64'"),
    "a grid of two numbers": ({"grid": lambda v, s: (s.rows, 1)}, r"its grid is \(1, 1\); required: three"),
    "a grid of floats": ({"grid": lambda v, s: (s.rows / 2, 1, 1)}, r"its grid is \(0.5, 1, 1\); required: three"),
    "a whole number between fractions": (
        {"args": lambda v: (*scale_rows().variant(width=64).args[:1], Scalar("factor", "i32", between=(0.5, 2)))},
        "factor is i32 between 0.5 and 2; required: whole numbers",
    ),
    "a scalar's bounds the wrong way": (
        {"args": lambda v: (*scale_rows().variant(width=64).args[:1], Scalar("factor", "f32", between=(2, 1)))},
        r"factor has between=\(2, 1\); required: \(least, greatest\)",
    ),
    "a grid of unknown names": ({"grid": lambda v, s: (s.rowz, 1, 1)}, "'rowz'.*factor, rows"),
    "LDS of another type": ({"lds": lambda v, a: (Lds("s", "half", 4),)}, "LDS array s is of 'half'"),
    "LDS twice": ({"lds": lambda v, a: (Lds("s", "float", 4),) * 2}, "two LDS arrays are named s"),
    "extents that are names": ({"extents": ("rows",)}, r"extents are \('rows',\); required"),
    "bounds the wrong way": ({"extents": {"rows": (5, 1)}}, r"extent rows has \(5, 1\); required"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_a_declaration_that_cannot_be_is_refused_where_it_is_made(which: str) -> None:
    changes, message = REFUSED[which]
    with pytest.raises(InputError, match=message):
        scale_rows(**changes)


def test_a_kernel_without_scalars() -> None:
    family = scale_rows(
        args=lambda v: (Tensor("x", "f32", ("rows", v.width), writes=True),),
        body="{{ signature }} { x[block_x() * {{ width }}] = 1.0f; }",
        reference=None,
    )
    x = np.zeros((3, 64), np.float32)
    hk.load(family.variant(width=64))(x=x)
    assert (x[:, 0] == 1).all()
    with pytest.raises(InputError, match="declares nothing to hold it against; give the family reference="):
        hk.parity(family.variant(width=64))


# ---- found by name --------------------------------------------------------------------------------------------------


def test_a_registered_family_is_known_by_name(registered: KernelFamily) -> None:
    assert hk.families()["scale_rows"] is registered
    assert hk.register(registered) is registered  # the same one again
    with pytest.raises(InputError, match="there is a kernel family scale_rows already, of a call of register"):
        hk.register(scale_rows())
    with pytest.raises(InputError, match="has the entry point scale_rows_w64, as scale_rows has; rename it"):
        hk.register(scale_rows(name="other"))
    with pytest.raises(InputError, match="42 is no KernelFamily"):
        hk.register(42)  # type: ignore[arg-type]


def test_families_of_a_file_and_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "own_kernels_of_a_test.py"
    file.write_text("import hipfire_kernels as hk\nfrom test_outside import scale_rows\nFAMILY = scale_rows()\n")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    fresh = Registry()
    monkeypatch.setenv("HIPFIRE_KERNELS_FAMILIES", str(file))
    assert "scale_rows" in fresh
    assert fresh.origin("scale_rows") == str(file)
    for name, message in {
        "no_such_module_anywhere": "cannot be imported: ModuleNotFoundError",
        str(tmp_path / "none.py"): "there is no such file",
        "json": "'json' holds no kernel family; assign a",
    }.items():
        with pytest.raises(InputError, match=message):
            fresh.load(name)


# ---- run and checked ------------------------------------------------------------------------------------------------


def test_a_loaded_kernel_is_a_callable() -> None:
    kernel = hk.load(scale_rows().variant(width=64), "host")
    x = np.ones((3, 64), np.float32)
    kernel(x=x, factor=2.0)
    bound = kernel.bind(x=x, factor=3)
    bound()
    bound()
    assert (x == 18).all()
    kernel.bind(x=np.zeros((0, 64), np.float32), factor=1)()  # no block, no launch
    with pytest.raises(InputError, match="factor is 'a'; required: a number"):
        kernel(x=x, factor="a")


@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        ("*= factor", "*= 2.0f", "error"),
        ("i < {{ width }}", "i < {{ width }} - 1", "error"),
        ("i < {{ width }}", "i < {{ width }} + 1", "end of x|beside x"),
        ("*= factor", "= factor", "error|instead of"),
    ],
)
def test_parity_sees_faults(old: str, new: str, seen: str) -> None:
    assert BODY.count(old) == 1
    variant = scale_rows(body=BODY.replace(old, new)).variant(width=64)
    with pytest.raises((ParityError, hk.DeviceError), match=seen) as failed:
        hk.parity(variant)
    if isinstance(failed.value, ParityError):
        assert failed.value.finding is not None
        assert not failed.value.finding.ok


@pytest.mark.parametrize(
    ("want", "got", "right"),
    [
        (65510.0, 65504.0, True),  # which it rounds to
        (65530.0, np.inf, True),
        (65530.0, 65504.0, True),  # nearer to where f16 ends than the tolerance
        (65490.0, np.inf, True),
        (-65530.0, -65504.0, True),
        (65600.0, 65504.0, False),
        (65400.0, np.inf, False),
        (65510.0, np.nan, False),
        (np.inf, 65504.0, False),
        (np.nan, 65504.0, False),
    ],
)
def test_where_a_dtype_ends_a_result_may_be_on_either_side(want: float, got: float, right: bool) -> None:
    arg = Tensor("x", "f16", ("n",), writes=True)
    error, fault = difference(arg, np.array([got], np.float16), np.array([want]), 1e-3)
    assert (error <= 1e-3 and not fault) == right
    assert right or fault.startswith("x[0] is ")


def test_a_copy_rounds_as_everybody_does() -> None:
    """With no tolerance there is one side."""
    arg, want = Tensor("x", "f16", ("n",), writes=True), np.array([65510.0, 65530.0])
    assert difference(arg, np.array([65504.0, np.inf], np.float16), want, 0.0)[1] == ""
    assert (
        difference(arg, np.array([65504.0, 65504.0], np.float16), want, 0.0)[1]
        == "x[1] is 65504 instead of inf (1 such)"
    )


def test_drawn_cases_come_back_from_json() -> None:
    variant = scale_rows(extents={"rows": (2, 9)}).variant(width=64)
    oracle = oracle_of(variant)
    seen = set()
    for seed in range(60):
        case = oracle.draw(variant, RandomSource(seed), WORK)
        assert oracle.read(variant, case.as_dict()) == case
        assert 2 <= case.extents["rows"] <= 9
        assert all(oracle.read(variant, simpler.as_dict()) for simpler in oracle.simpler(variant, case))
        seen |= {case.contents["x"], case.invariant}
    assert {"normal", "zeros", "nan", "inf", "repeat", "thread_order"} <= seen


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"extents": {}}, "extents of a case of scale_rows_w64 are none; required: rows"),
        ({"extents": {"rows": 0}}, r"extent rows is 0; required: 1 \.\. 67"),
        ({"contents": {"x": "odd"}}, "contents of x are 'odd'; required: one of normal"),
        ({"seed": -1}, "seed is -1"),
        ({"invariant": "odd"}, "invariant is 'odd'"),
        ({"rows": 3}, "has rows; its fields are"),
    ],
)
def test_a_case_that_no_draw_gives_is_refused(fields: dict[str, Any], message: str) -> None:
    variant = scale_rows().variant(width=64)
    whole = {"variant": "scale_rows_w64", "extents": {"rows": 1}, "scalars": {"factor": 1}, "contents": {"x": "normal"}}
    with pytest.raises(InputError, match=message):
        oracle_of(variant).read(variant, {**whole, **fields})


def test_a_reference_that_returns_something_else() -> None:
    for reference, message in [
        (lambda x: x[:1], r"returns x of shape \(1, 64\); required: \(\d+, 64\)"),
        (lambda x: {"y": x}, "returns y; required: x"),
    ]:
        with pytest.raises(InputError, match=message):
            hk.parity(scale_rows(reference=reference).variant(width=64))


# ---- built ahead ----------------------------------------------------------------------------------------------------


def test_a_bundle_serves_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hipfire_kernels.building import builder
    from hipfire_kernels.errors import ToolchainUnavailable

    variant = scale_rows().variant(width=64)
    manifest = builder.write_bundle([(variant, "host"), (variant, "gfx1100")], tmp_path / "made")
    with pytest.raises(InputError, match="holds a bundle already"):
        builder.write_bundle([], tmp_path / "made")
    compiled = hk.build(variant, "gfx1100")

    def none(*_: Any) -> Any:
        raise ToolchainUnavailable("no compiler here")

    monkeypatch.setattr(builder, "choose", none)
    monkeypatch.setattr(bundle, "_used", [])
    hk.use_bundle(manifest.parent)
    served = hk.build(variant, "gfx1100")
    assert (served.code, served.resources) == (compiled.code, compiled.resources)
    x = np.ones((2, 64), np.float32)
    hk.launch(variant, hk.device("host"), x=x, factor=3)
    assert (x == 3).all()
    with pytest.raises(ToolchainUnavailable, match="does not serve scale_rows_w96 for gfx1100: it is not in it"):
        hk.build(scale_rows().variant(width=96), "gfx1100")
    edited = scale_rows(body=BODY + "// edited\n").variant(width=64)
    with pytest.raises(ToolchainUnavailable, match="it was built from another source than the templates here give"):
        hk.build(edited, "gfx1100")
    file = next(manifest.parent.glob("*.code"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match="is damaged; its digest is another"):
        [hk.build(variant, arch) for arch in ("host", "gfx1100")]
    with pytest.raises(InputError, match=r"manifest\.json cannot be read"):
        hk.use_bundle(tmp_path)


# ---- a package of somebody else's -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, built and installed into a folder of its own."""
    source, to = tmp_path_factory.mktemp("source") / "rows", tmp_path_factory.mktemp("installed")
    shutil.copytree(PACKAGE, source)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(to), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return to


def hfk(installed: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `hfk` beside the installed package."""
    path = os.pathsep.join(filter(None, [str(installed), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "hipfire_kernels.cli", *arguments]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, cwd=cwd or installed
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["list"], "rms_norm"),
        (["parity", "rms_norm", "swiglu", "top_k", "--quick"], "11 variants"),
        (["fuzz", "rms_norm", "swiglu", "top_k", "--count", "500", "--seed", "3"], "0 failures"),
        (["lint", "rms_norm_f16", "top_k8"], ""),
        (["isa", "rms_norm_f32", "--arch", "gfx1100", "--counts"], "rms_norm.hip.j2:"),
        (["build", "top_k", "--arch", "gfx1100,gfx1201"], "top_k8"),
        (["render", "swiglu_bf16", "--arch", "gfx1201"], '"elements.h"'),
    ],
    ids=lambda part: part[0] if isinstance(part, list) else "",
)
def test_commands_on_the_package(arguments: list[str], expected: str, installed: Path) -> None:
    done = hfk(installed, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert expected in done.stdout


def test_its_own_tests_pass(installed: Path) -> None:
    path = os.pathsep.join(filter(None, [str(installed), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PACKAGE / "tests")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert "11 passed" in done.stdout, done.stdout + done.stderr


FAULTS = {
    "no barrier": ("rms_norm.hip.j2", "    block_sync();\n", "", "rms_norm_f32"),
    "another stride": (
        "rms_norm.hip.j2",
        "(long long)block_x() * d;",
        "(long long)block_x() * (d + 1);",
        "rms_norm_f32",
    ),
    "one part forgotten": ("rms_norm.hip.j2", " + parts[3]", "", "rms_norm_f32"),
    "eps forgotten": ("rms_norm.hip.j2", " + eps);", ");", "rms_norm_f32"),
    "one element short": ("swiglu.hip.j2", "i < d;", "i < d - 1;", "swiglu_f16"),
    "one element beyond": ("swiglu.hip.j2", "i < d;", "i <= d;", "swiglu_f16"),
    "the sign of the exponent": ("swiglu.hip.j2", "exp2_f32(-LOG2_E", "exp2_f32(LOG2_E", "swiglu_f16"),
    "ties the other way": ("top_k.hip.j2", "at < best_at)) {", "at > best_at)) {", "top_k8"),
}


@pytest.mark.parametrize("which", FAULTS)
def test_one_line_faults_in_the_package_are_caught(which: str, installed: Path, tmp_path: Path) -> None:
    template, old, new, variant = FAULTS[which]
    shutil.copytree(installed, tmp_path / "copy")
    file = tmp_path / "copy" / "rowkernels" / "templates" / template
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    done = hfk(tmp_path / "copy", "parity", variant, "--quick")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED" in done.stdout or "FAILED" in done.stderr


def test_a_bundle_of_the_package(installed: Path, tmp_path: Path) -> None:
    done = hfk(installed, "bundle", "rms_norm", "--arch", "gfx1100,gfx1201", "--out", str(tmp_path / "made"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 kernels for gfx1100, gfx1201" in done.stdout
    assert len(bundle.Bundle(tmp_path / "made").kernels) == 6


class Copied:
    """The package, in a folder where its templates may be edited: what `Watching` asks of a tree."""

    def __init__(self, root: Path) -> None:
        self.root, self.env = root, {**os.environ, "PYTHONUNBUFFERED": "1"}
        shutil.copytree(PACKAGE / "rowkernels", root / "rows")

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "hipfire_kernels.cli", "--families", "rows/kernels.py", *arguments]

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.root / "rows" / "templates" / file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1
        path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    running = Watching(Copied(tmp_path), "rms_norm_f32", "--arch", "gfx1100")
    yield running
    running.close()


def test_watch_on_the_package(watching: Watching) -> None:
    assert "good     ready: 1 of the variants watched" in watching.said
    said = watching.save("rms_norm.hip.j2", " + eps);", ");")
    assert "FAILED   host rms_norm_f32: FAILED rms_norm_f32 rows=" in said
    assert "NOT GOOD saved rms_norm.hip.j2" in said
    said = watching.save("rms_norm.hip.j2", "/ (float)d);", "/ (float)d + eps);")
    assert "good     saved rms_norm.hip.j2" in said
    said = watching.save("elements.h", "{ return row[i]; }", "{ return row[i + 1]; }")
    assert "behind the end of " in said
    assert "NOT GOOD saved elements.h" in said
