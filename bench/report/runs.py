"""The part of a report that is A/B runs: each with its pairs, its verdict, and what stands beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hipfire_kernels.bench.ab import beside
from hipfire_kernels.bench.pairs import OFF, ON, Judgement
from hipfire_kernels.bench.report.parts import Run, Section, compiler
from hipfire_kernels.bench.report.plots import Line, Plot
from hipfire_kernels.bench.report.results import Document


def runs(documents: Sequence[Document]) -> Section:
    """Each A/B run with its pairs."""
    return Section(
        "ab",
        "A/B pairs",
        "Every sample is a fresh process, in an order declared before. A dot is a pair of neighbours: off over on, so "
        "that above 1 on is faster. The shade is the bootstrap interval of the median over pairs; a verdict needs it "
        "to leave out 1, and signs that equal arms would not show in 2,000 runs.",
        runs=[_run(document) for document in documents],
    )


def _run(document: Document) -> Run:
    arms = document.get("arms")
    title = f"{document['variable']}: {arms[OFF]} (off), {arms[ON]} (on)" if arms else str(document["variable"])
    stopped = document.get("refused") or document.get("traced")
    if stopped or not document.get("judgement"):
        return Run(title, f"no times: {stopped}", False, None, _facts(document))
    judged = Judgement.from_dict(document["judgement"])
    pairs = document["ratios"]
    tips = tuple(f"pair {n}: {r:.4f}" for n, r in enumerate(pairs, 1))
    line = Line("pairs", 0, tuple((float(n), r) for n, r in enumerate(pairs, 1)), tips)
    shade = (judged.interval, f"interval of the median at {judged.level:.1%}")
    plot = Plot(title, "pair", "off / on", (line,), log="", levels=((1.0,), "equal"), band=shade, joined=False)
    return Run(title, judged.describe(), judged.verdict is not None, plot, _facts(document))


def machine(document: Document) -> str:
    """Device, driver and compiler that a run is bound to; empty where it did not come so far."""
    pinned = document.get("pinned", {}).get("machine", {})
    facts = (pinned.get("device"), pinned.get("driver"), compiler(pinned.get("toolchain")))
    return ", ".join(str(fact) for fact in facts if fact)


def _facts(document: Document) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    pinned = document.get("pinned", {})
    found.append(("machine", machine(document)))
    found.append(("set", _switches(pinned.get("environment", {}).get("shown", {}))))
    if "shape" in pinned:
        shape = pinned["shape"]
        found.append(("shape", f"{shape['ctx']:,} keys, {shape['rows']} rows, head_dim {shape['head_dim']}"))
    if "prompt" in pinned:
        equal = document.get("equal") or {}
        found.append(("prompt", f"{pinned['prompt']['tokens']:,} tokens, {pinned['prompt']['sha256'][:12]}"))
        if equal:
            found.append(("equal", f"{equal['tokens']} tokens, {equal['cycles']} cycles, tau {equal['tau']:.3f}"))
            found += [(f"ran {arm}", _counted(ran["routes"])) for arm, ran in equal["ran"].items()]
    for arm, value in (document.get("medians") or {}).items():
        found.append((arm, f"{value:.6g} {document['unit']}, {beside(document, arm)}"))
    found.append(("code", str(pinned.get("code", ""))[:12]))
    return [(name, text) for name, text in found if text]


def _switches(shown: Mapping[str, str]) -> str:
    """What both arms had set of this library's switches; paths are digests, and say nothing."""
    ours = {
        name: text for name, text in shown.items() if name.startswith("HIPFIRE_") and not text.startswith("sha256 ")
    }
    return ", ".join(f"{name}={text}" for name, text in ours.items())


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in counts.items())
