"""`hfk doctor`: what the library finds on this machine, and what it will use."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated, Any

import typer

from hipfire_kernels.cli import _out

Checkpoint = Annotated[
    Path | None,
    typer.Option(help="A folder or .hfq file: whether it can be loaded, and what of its config is not read."),
]


def doctor(checkpoint: Checkpoint = None, as_json: _out.Json = False) -> None:
    """What is found here, what will be used, and why."""
    from hipfire_kernels import __version__
    from hipfire_kernels.building.cache import default_cache
    from hipfire_kernels.building.storage import folder_bytes
    from hipfire_kernels.dispatch import policy
    from hipfire_kernels.running.devices import devices

    looked_at = {} if checkpoint is None else {"checkpoint": _checkpoint(checkpoint)}
    root = default_cache().path
    found = {
        "hipfire_kernels": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cache": {"path": str(root), "bytes": folder_bytes(root)},
        "compilers": _compilers(),
        "devices": list(devices()),
        "switches": policy.report(),
        **looked_at,
    }
    if as_json:
        _out.document(found)
    else:
        _print(found)


def _compilers() -> list[dict[str, Any]]:
    """Who could compile for each arch, who does, and why not the others. Archs that fare alike share one."""
    from hipfire_kernels.archs import ARCHS

    groups: list[dict[str, Any]] = []
    for name in ARCHS:
        facts = _compilers_for(name)
        same = next((g for g in groups if {k: g[k] for k in facts} == facts), None)
        if same is None:
            groups.append({"archs": [name], **facts})
        else:
            same["archs"].append(name)
    return groups


def _compilers_for(name: str) -> dict[str, Any]:
    from hipfire_kernels.archs import arch
    from hipfire_kernels.building.toolchains.registry import choose, toolchains
    from hipfire_kernels.errors import HipfireError

    target = arch(name)
    try:
        chosen = choose(target).name
    except HipfireError:  # the candidates below say why
        chosen = None
    candidates = [
        {"toolchain": t.name, "name": c.label, "usable": c.reason is None, "why": c.reason or c.identity}
        for t in toolchains()
        if t.targets(target)
        for c in t.candidates(target)
    ]
    return {"chosen": chosen, "candidates": candidates}


def _checkpoint(path: Path) -> dict[str, Any]:
    """What a checkpoint is, all of it checked but the values of its tensors."""
    from hipfire_kernels.model.draft_config import DraftConfig
    from hipfire_kernels.model.loading import open_either

    config, tensors = open_either(path)
    return {
        "path": str(path),
        "kind": "DFlash draft" if isinstance(config, DraftConfig) else "Qwen3.5 target",
        "tensors": len(tensors.entries),
        "bytes": sum(entry.end - entry.begin for entry in tensors.entries.values()),
        "left_out": tensors.skipped,
        "unread_keys": list(config.notes.unread),
        "assumed_keys": list(config.notes.assumed),
    }


def _print(found: dict[str, Any]) -> None:
    print(f"hipfire-kernels {found['hipfire_kernels']}, Python {found['python']}, {found['platform']}")
    print(f"cache    {found['cache']['path']} ({found['cache']['bytes'] / 1e6:.1f} MB)")
    print(f"devices  {', '.join(found['devices'])}")
    for group in found["compilers"]:
        print(f"\ncompilers for {', '.join(group['archs'])}, in order of preference")
        for c in group["candidates"]:
            print(f"  {_mark(c, group['chosen'])}  {c['toolchain']}: {c['name']}: {c['why']}")
    print("\nenvironment switches")
    for s in found["switches"]:
        value = "unset" if s["value"] is None else repr(s["value"])
        print(f"  {s['name']}: {value}; default: {s['default']}; legal: {s['legal']}")
        if s["problem"]:
            print(f"    problem: {s['problem']}")
    if it := found.get("checkpoint"):
        print(f"\ncheckpoint {it['path']}: a {it['kind']} that can be loaded")
        print(f"  tensors: {it['tensors']} ({it['bytes'] / 1e6:.1f} MB), {len(it['left_out'])} more are left out")
        print(f"  keys of its config that are not known here and not read: {', '.join(it['unread_keys']) or 'none'}")
        print(f"  missing keys, taken as transformers does: {', '.join(it['assumed_keys']) or 'none'}")


def _mark(candidate: dict[str, Any], chosen: str | None) -> str:
    if not candidate["usable"]:
        return "absent"
    return "chosen" if candidate["toolchain"] == chosen else "usable"
