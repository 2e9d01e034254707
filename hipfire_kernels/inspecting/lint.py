"""What can be said about the templates without running them.

Every variant is rendered for every arch it fits. Of those that differ in numbers only, the last is compiled, for one
arch of each generation (others of it get the same text) and the host; what NVIDIA gets is read by clang too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from hipfire_kernels.archs import ARCHS, Arch
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.authoring.templates import LIBRARY
from hipfire_kernels.building.processes import pool
from hipfire_kernels.building.toolchains.registry import choose
from hipfire_kernels.errors import CompileError, RenderError, ToolchainUnavailable
from hipfire_kernels.inspecting import isa, lint_cuda, outline

COLUMNS = 120
"""The most that a line of a template may have, as one of Python."""

WARNINGS = (
    "-Werror",
    "-Wcast-qual",
    "-Wdouble-promotion",  # double is a sixteenth of the rate or less
    "-Wfloat-conversion",
    "-Wimplicit-fallthrough",
    "-Wpass-failed",  # a loop that was to be unrolled and was not
    "-Wshadow",
    "-Wunreachable-code",
)
"""Beside `-Wall -Wextra`, which every build has."""

_ALIGNMENT = "-Wcast-align"
"""Not on the host, whose fiber runtime casts bytes to stack slots."""

FORBIDDEN = re.compile(
    r"\b(?:threadIdx|blockIdx|blockDim|gridDim|warpSize|hk::\w+|HK_\w+|hip\w+_[xyz]|__shared__|__sync\w+|__shfl\w*|"
    r"__(?:ballot|any|all|popc|clz|ffs|brev|byte_perm|u?mulhi|float_as|u?int_as|hip_atomic)\w*|atomic[A-Z]\w*|__builtin_(?:amdgcn|nvvm|ptx|ia32)_\w+|__nv\w+|__ockl_\w+|get_(?:local|group|global)_id)\b"
)
"""What a kernel's body may not name: it is not the same in every dialect, or not there. The declaration gives `SHARED`,
which declares LDS."""

_DIALECT_FILE = re.compile(r"(?:^|_)(?:amd|nvidia|host)(?:_|\.)|^wave\.h$|^shared_arena\.h$")
"""Files that define the vocabulary, for one dialect by their name or below it."""

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\{#.*?#\}", re.DOTALL)
_LDS = re.compile(r"\.amdhsa_group_segment_fixed_size (\d+)")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        where: a template with its line, or a variant with its arch.
        rule: `columns`, `vocabulary`, `render`, `warning`, `address-space`, `private-memory` or `lds`.
        text: what was seen.
    """

    where: str
    rule: str
    text: str


@dataclass(frozen=True)
class Lint:
    """What was looked at and found.

    Attributes:
        rendered: pairs of variant and arch.
        compiled: those of them that were compiled.
        skipped: archs that nothing could compile for, with the reason.
    """

    findings: tuple[Finding, ...]
    rendered: int
    compiled: int
    skipped: dict[str, str]


Check = Callable[[Variant, Arch], list[Finding]]
"""What is done with a variant on an arch."""


def lint(variants: Sequence[Variant], *, every: bool = False) -> Lint:
    """Check templates.

    Args:
        variants: those to render.
        every: compile them all, not those alone that stand for others.
    """
    findings = [*_texts(variants), *_render(variants)]
    refused = {finding.where for finding in findings if finding.rule == "render"}
    targets, skipped = _targets()
    jobs: list[tuple[Check, Variant, Arch]] = []
    for check, arch in targets:
        fitting = [v for v in variants if v.fits(arch.name) and f"{v.name} {arch.name}" not in refused]
        jobs += [(check, v, arch) for v in (fitting if every else outline.last(fitting, arch.name))]
    with pool() as threads:
        for found in threads.map(lambda job: job[0](job[1], job[2]), jobs):
            findings += found
    rendered = sum(v.fits(name) for v in variants for name in ARCHS)
    return Lint(tuple(findings), rendered, len(jobs), skipped)


def _targets() -> tuple[list[tuple[Check, Arch]], dict[str, str]]:
    """The first arch of each generation with what is done for it, and why nothing can be for the others."""
    first: dict[str, Arch] = {}
    for arch in ARCHS.values():
        first.setdefault(arch.name[:5], arch)
    targets: list[tuple[Check, Arch]] = []
    skipped = {}
    for arch in first.values():
        try:
            choose(arch)
            targets.append((_compile, arch))
        except ToolchainUnavailable as error:
            skipped[arch.name] = str(error)
        if arch.dialect == "nvidia":
            reason = lint_cuda.unavailable()
            if reason is None:
                targets.append((_read_cuda, arch))
            else:
                skipped[f"{arch.name} by clang"] = reason
    return targets, skipped


def _read_cuda(variant: Variant, arch: Arch) -> list[Finding]:
    said = lint_cuda.complaints(variant.source(arch.name), (*WARNINGS, _ALIGNMENT))
    return [Finding(f"{variant.name} {arch.name}", "warning", _first(said))] if said else []


def _texts(variants: Sequence[Variant]) -> Iterator[Finding]:
    """Lines too long, and names of one dialect in text that is for all of them."""
    for name, text in _sources(variants):
        yield from columns(name, text)
        if not _DIALECT_FILE.search(name):
            yield from words(name, text)


def _sources(variants: Sequence[Variant]) -> Iterator[tuple[str, str]]:
    """Name and text of the library's templates, of those beside the variants' own, and of bodies without a file."""
    templates = dict.fromkeys(variant.template for variant in variants)
    own = dict.fromkeys(template.folder for template in templates if template.folder is not None)
    for folder in (Path(str(resources.files(LIBRARY))), *own):
        for file in sorted(folder.iterdir()):
            if file.name.endswith((".h", ".j2")):
                yield file.name, file.read_text(encoding="utf-8")
    yield from ((template.name, template.body) for template in templates if template.body is not None)


def columns(name: str, text: str) -> Iterator[Finding]:
    """Lines of more than `COLUMNS`, as they are written; what is put into them may be longer."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > COLUMNS:
            yield Finding(f"{name}:{number}", "columns", f"{len(line)} columns, {COLUMNS} are allowed")


def words(name: str, text: str) -> Iterator[Finding]:
    """Uses of what `FORBIDDEN` names, outside of comments."""
    code = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
    for number, line in enumerate(code.splitlines(), 1):
        for word in FORBIDDEN.findall(line):
            yield Finding(f"{name}:{number}", "vocabulary", f"{word} is not a word that every dialect has")


def _render(variants: Sequence[Variant]) -> Iterator[Finding]:
    for variant in variants:
        for arch in ARCHS:
            try:
                if variant.fits(arch):
                    variant.source(arch)
            except RenderError as error:
                yield Finding(f"{variant.name} {arch}", "render", str(error))


def _compile(variant: Variant, arch: Arch) -> list[Finding]:
    source, compiler = variant.source(arch.name), choose(arch)
    try:
        if arch.dialect == "amd":
            text = compiler.assembly(source, arch, (*WARNINGS, _ALIGNMENT))
            return [Finding(f"{variant.name} {arch.name}", *found) for found in _code(variant, arch, text)]
        # The host's code is not looked at: unoptimised, it compiles in a fifth of the time.
        extra = ("-O0", *WARNINGS) if arch.dialect == "host" else ()
        log = compiler.compile(source, arch, extra).log.strip()
    except CompileError as error:
        log = error.log or str(error)
    return [Finding(f"{variant.name} {arch.name}", "warning", _first(log))] if log else []


def _first(log: str) -> str:
    """The first complaint of a log, with the source line under it, and how many more there are."""
    lines = log.splitlines()
    places = [i for i, line in enumerate(lines) if re.search(r"(?:error|warning)\b", line)] or [0]
    quoted = lines[places[0] + 1].strip() if len(lines) > places[0] + 1 else ""
    return f"{lines[places[0]].strip()} {quoted}" + (f" (and {len(places) - 1} more)" if len(places) > 1 else "")


def _code(variant: Variant, arch: Arch, assembly: str) -> Iterator[tuple[str, str]]:
    """Rule and text of what the code of a gfx arch shows."""
    counts = isa.parse(assembly, variant.entry, arch.name).totals
    if counts["flat"]:
        yield (
            "address-space",
            f"{counts['flat']} flat accesses: the compiler cannot tell LDS from global memory",
        )
    if counts["scratch"]:
        yield (
            "private-memory",
            f"{counts['scratch']} accesses to private memory: spills, or arrays indexed at run time",
        )
    taken, declared = int(_LDS.findall(assembly)[0]), variant.lds_bytes(arch.name)
    if taken > declared:
        yield "lds", f"{taken} bytes of LDS, {declared} declared"
