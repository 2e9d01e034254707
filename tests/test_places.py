"""Lines of a rendered source are those of its templates, whatever Jinja did with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hipfire_kernels import ARCHS, CompileError, KernelFamily, RenderError, Scalar, Tensor, Tolerance, build, families
from hipfire_kernels.authoring import templates
from hipfire_kernels.authoring.family import Lds, Variant
from hipfire_kernels.authoring.places import Place, Places, mark, resolve, without
from hipfire_kernels.authoring.render import source_digest
from hipfire_kernels.building.toolchains import diagnostics


def kernel(body: str = "", template: Path | None = None) -> Variant:
    family = KernelFamily(
        name="placed",
        doc="whatever the test says",
        params={"head_dim": (128,)},
        entry=lambda v: "placed",
        args=lambda v: (Tensor("x", "f32", ("rows", v.head_dim), writes=True), Scalar("factor", "f32")),
        grid=lambda v, s: (s.rows, 1, 1),
        lds=lambda v, arch: (Lds("scores", "float", 3),),
        tolerance=Tolerance(1e-6),
        body=body or None,
        template=template,
    )
    return family.variant(head_dim=128)


def test_marks_become_directives() -> None:
    text = "".join(f"{mark(*place)}{line}\n" for place, line in [(("a", 1), "x"), (("a", 2), "y"), (("b", 7), "z")])
    assert resolve("banner\n" + text + "w\n") == 'banner\n#line 1 "a"\nx\ny\n#line 7 "b"\nz\nw\n'
    assert without(resolve(text)) == "x\ny\nz\n"


def test_the_last_mark_of_a_line_counts() -> None:
    """Those before it are of lines that came out empty; one behind the first character is of a block inside."""
    assert resolve(f"{mark('a', 3)}  {mark('a', 6)}x{mark('a', 9)}y\n") == '#line 6 "a"\n  xy\n'


def test_no_directive_in_the_middle_of_a_macro() -> None:
    text = f"{mark('a', 1)}#define X \\\n{mark('a', 5)}  1\n{mark('a', 9)}int x;\n"
    assert resolve(text) == '#line 1 "a"\n#define X \\\n  1\n#line 9 "a"\nint x;\n'


@pytest.mark.parametrize("arch", ["gfx1100", "sm_90", "host"])
def test_every_line_is_that_of_its_template(arch: str) -> None:
    """Of the last variant of each family: all lines that Jinja put nothing into."""
    compared = 0
    for family in families().values():
        variant = [v for v in family.variants() if v.fits(arch)][-1]
        for place, line in Places.of(variant.source(arch)).texts.items():
            path = templates.Template(place.file).path
            assert path is not None
            if not path.is_file():
                assert place.file.startswith("declaration of ") or not place.file
                continue
            lines = path.read_text(encoding="utf-8").splitlines()
            if not line.strip() and place.line > len(lines):
                continue  # a blank line between two files
            written = lines[place.line - 1]
            if "{{" not in written and "{%" not in written:
                assert line == written, place
                compared += 1
    assert compared > 1000


def test_the_digest_is_of_the_kernel_not_of_where_its_lines_stand() -> None:
    plain, moved = (kernel(top + "{{ signature }} {\n    x[0] = factor;\n}\n") for top in ("", "{# a comment #}\n"))
    assert plain.source() != moved.source()
    assert source_digest(plain.source()) == source_digest(moved.source())


LOOP = """{{ signature }} {
{% for i in range(3) %}
    const int a{{ i }} = {{ i }};
{% endfor %}
    x[0] = missing(a0)
    x[1] = a1 + unknown;
}
"""


@pytest.mark.parametrize("arch", ["gfx1100", "host"])
def test_every_error_has_the_line_of_the_template(arch: str) -> None:
    assert ARCHS[arch]
    with pytest.raises(CompileError) as refused:
        build(kernel(LOOP), arch)
    found = [one for one in diagnostics.read(refused.value.log, refused.value.source) if one.kind == "error"]
    assert {one.place for one in found} == {Place("body of placed", 5), Place("body of placed", 6)}
    assert found[0].text == "x[0] = missing(a0)"
    for word in ("missing", "unknown", "body of placed:5: error", "body of placed:6: error"):
        assert word in str(refused.value)


def test_an_error_in_a_header_is_the_headers(tmp_path: Path) -> None:
    (tmp_path / "own.h").write_text("// first\n__device__ int twice(int a) { return 2 * a }\n")
    (tmp_path / "placed.hip.j2").write_text('{% include "own.h" %}\n\n{{ signature }} {\n    x[0] = twice(2);\n}\n')
    with pytest.raises(CompileError, match=r"own\.h:2: error: expected ';'.*return 2 \* a"):
        build(kernel(template=tmp_path / "placed.hip.j2"), "host")


def test_nvrtc_and_clang_are_read() -> None:
    source = '#line 4 "k.hip.j2"\nint x = y;\n'
    log = (
        'k.hip.j2(4): error: identifier "y" is undefined\n'
        "k.hip.j2:4:9: warning: something [-Wsome]\n"
        "k.hip.j2:4:9: warning: something [-Wsome]\n"
        "1 error detected in the compilation\n"
        "nvrtc: error: invalid value for --gpu-architecture\n"
    )
    assert [(one.kind, one.place, one.text) for one in diagnostics.read(log, source)] == [
        ("error", Place("k.hip.j2", 4), "int x = y;"),
        ("warning", Place("k.hip.j2", 4), "int x = y;"),
        ("error", Place(), ""),
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "{{ signature }} {\n  {{ head_dm }}\n}\n",
            r"placed:2: 'head_dm' is undefined. Did you mean 'head_dim'",
        ),
        ("{{ signature }} {\n  {{ lds.scoers }}\n}\n", r"body of placed:2: no LDS array 'scoers'.*mean 'lds.scores'"),
        ('\n{% include "softmaxx.h" %}\n', r"body of placed:2: there is no template 'softmaxx.h'; did you mean"),
        ("{{ signature }} {\n{% if head_dim %}\n}\n", r"body of placed:\d: Unexpected end of template"),
    ],
)
def test_an_error_of_jinja_has_its_line(body: str, message: str) -> None:
    with pytest.raises(RenderError, match=message):
        kernel(body).source("host")
