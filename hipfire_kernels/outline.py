"""Which variants have the same code but for its numbers, so that a few can stand for all where time is short."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .family import Variant


def outline(source: str) -> str:
    """A rendered source with its numbers masked, without the banner (which has a digest)."""
    _, _, body = source.partition("\n\n")
    return re.sub(r"\d+", "#", body)


def groups(variants: Iterable[Variant], arch: str) -> list[list[Variant]]:
    """Variants by outline, in their order."""
    found: dict[str, list[Variant]] = {}
    for variant in variants:
        found.setdefault(outline(variant.source(arch)), []).append(variant)
    return list(found.values())


def last(variants: Iterable[Variant], arch: str) -> list[Variant]:
    """The last of each group: every branch of the templates, with its largest numbers."""
    return [group[-1] for group in groups(variants, arch)]
