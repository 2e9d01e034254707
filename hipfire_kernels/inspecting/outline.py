"""Which variants have the same code but for its numbers, so that a few can stand for all where time is short."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from hipfire_kernels.authoring import places
from hipfire_kernels.authoring.family import Variant


def outline(source: str) -> str:
    """A rendered source with its numbers masked, without the banner (which has a digest) and `#line` directives."""
    _, _, body = source.partition("\n\n")
    return _masked(places.without(body))


def _masked(text: str) -> str:
    return re.sub(r"\d+", "#", text)


def groups(variants: Iterable[Variant], arch: str) -> list[list[Variant]]:
    """Variants by outline, in their order."""
    found: dict[str, list[Variant]] = {}
    for variant in variants:
        found.setdefault(outline(variant.source(arch)), []).append(variant)
    return list(found.values())


def last(variants: Iterable[Variant], arch: str) -> list[Variant]:
    """The last of each group: every branch of the templates, with its largest numbers."""
    return [group[-1] for group in groups(variants, arch)]


def few(sources: Mapping[Variant, Sequence[str]]) -> list[Variant]:
    """Fewer than one of each group, for when there is less time: together they have every line of the sources, but for
    its numbers, and every value of the parameters by which groups differ. Not every combination of branches.

    Args:
        sources: of each variant, one for each arch.
    """
    alike: dict[tuple[str, ...], Variant] = {}
    for variant, texts in sources.items():
        alike[tuple(map(outline, texts))] = variant
    parts = {variant: _parts(variant, outlines) for outlines, variant in reversed(alike.items())}
    left: set[tuple[object, ...]] = set().union(*parts.values())
    chosen: list[Variant] = []
    while left:
        chosen.append(max(parts, key=lambda v: len(parts[v] & left)))
        left -= parts[chosen[-1]]
    return chosen


def _parts(variant: Variant, outlines: Iterable[str]) -> set[tuple[object, ...]]:
    """Lines, but for those with the entry point, which has a name of its own in each variant; parameters."""
    entry = _masked(variant.entry)
    lines = {(line,) for text in outlines for line in text.splitlines() if entry not in line}
    return {*lines, *((variant.family.name, *pair) for pair in variant.params)}
