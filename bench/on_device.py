"""Everything that needs a GPU, in one call: parity, sanitizers, host time of a plan, the kernel table, peers.

    python -m hipfire_kernels.bench.on_device --device cuda:0 --out DIR parity sanitize host table peers

Each section prints a short summary and leaves its figures in DIR as JSON. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import attend, families, kv_write, reference
from ..attention import TilePlan, check_verify
from ..binding import bind, run
from ..family import Variant
from ..parity import CONTEXTS, ROWS, Case, check, grid, inputs, run_attend, tile_twin, worst_row
from ..runtime import device as open_device
from ..runtime.gpu import GpuDevice
from . import kernels, peers

LONG = (32768, 131072)


def variants() -> list[Variant]:
    """Every shipped variant."""
    return [v for family in families().values() for v in family.variants()]


def parity_of(name: str, device_name: str, rows: Sequence[int], contexts: Sequence[int]) -> dict[str, Any]:
    """One variant over a grid; for a pool of processes."""
    device = open_device(device_name)
    variant = next(v for v in variants() if v.name == name)
    results = [check(variant, case, device) for case in grid(variant, rows=rows, contexts=contexts)]
    failed = [r.describe() for r in results if not r.ok]
    return {"variant": name, "cases": len(results), "worst": max(r.error for r in results), "failed": failed}


def parity(device_name: str) -> dict[str, Any]:
    """The full grid for every variant, long contexts for the tuned ones, offsets beyond 2^31, the rows' bits."""
    jobs: list[tuple[str, str, Sequence[int], Sequence[int]]] = [(v.name, device_name, ROWS, CONTEXTS) for v in variants()]
    jobs += [
        (v.name, device_name, (1, 5, 16, 32), LONG)
        for v in variants()
        if v.family.oracle == "attend" and v.head_dim in (128, 256)
    ]
    with concurrent.futures.ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        reports = list(pool.map(parity_of, *zip(*jobs, strict=True)))
    device = open_device(device_name)
    return {"grid": reports, "bits": _row_bits(device), "beyond_2_31": _beyond_two_to_the_31(device)}


def _row_bits(device: Any) -> dict[str, bool]:
    """Whether multi-row output has the bits of tile_batched, and a row the same bits in any company."""
    found = {}
    for variant in families()["attention_flash_q8_0_rows"].variants():
        case = Case(16, 2048, 12, 2, variant.head_dim, seed=5)
        whole, _ = run_attend(variant, case, device)
        same = np.array_equal(whole, run_attend(tile_twin(variant), case, device)[0])
        for start, count in [(0, 1), (3, 4), (5, 8), (15, 1)]:
            part, _ = run_attend(variant, case, device, slice(start, start + count))
            same &= np.array_equal(part, whole[start : start + count])
        found[variant.name] = bool(same)
    return found


def _beyond_two_to_the_31(device: Any) -> float:
    """Worst error of a windowed row at the end of a cache of 2.3 GB a tensor, written there by the KV kernel."""
    capacity, window = 4_250_000, 90
    cache = device.to_device(np.zeros((capacity, 2, 8, 34), np.uint8))
    rng = np.random.default_rng(9)
    new = rng.standard_normal((200, 2, 256), np.float32)
    slots = np.arange(capacity - 200, capacity, dtype=np.int32)
    kv_write(device.to_device(new), device.to_device(new), cache, cache, slots, device=device)
    tail = np.zeros((200, 2, 8, 34), np.uint8)
    host = open_device("host")
    kv_write(new, new, tail, tail, np.arange(200, dtype=np.int32), device=host)
    q = rng.standard_normal((1, 2, 256), np.float32)
    got = attend(device.to_device(q), cache, cache, slots[-1:], window=window)
    return worst_row(device.to_host(got), reference.attend(q, tail, tail, np.array([199]), window=window))


def one_shape(device_name: str) -> None:
    """One small case of every variant; what the sanitizers run."""
    device = open_device(device_name)
    for variant in variants():
        case = next(c for c in grid(variant, rows=(13,), contexts=(129,)) if c.n_heads == 8)
        result = check(variant, case, device)
        if not result.ok:
            sys.exit(result.describe())


def sanitize(device_name: str) -> dict[str, str]:
    """compute-sanitizer over `one_shape`: the last line of each tool, or why it did not run."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"compute-sanitizer": "not on PATH"}
    program = f"from hipfire_kernels.bench.on_device import one_shape; one_shape({device_name!r})"
    found = {}
    for check_name in ("memcheck", "racecheck"):
        argv = [tool, "--tool", check_name, "--error-exitcode", "9", sys.executable, "-c", program]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=280)
        lines = [line for line in done.stdout.splitlines() if "SUMMARY" in line] or (done.stdout + done.stderr).splitlines()[-3:]
        found[check_name] = f"exit {done.returncode}: {' '.join(lines)}"
    return found


def host_time(device: GpuDevice) -> dict[str, float]:
    """Host microseconds of one plan.run (two launches), and of two bare launches of the same kernels."""
    case = Case(16, 4096, 24, 4, 256)
    i = inputs(case)
    arrays = [device.to_device(a) for a in (i.q, i.k_cache, i.v_cache, i.positions)]
    out = device.empty(i.q.shape, np.float32)
    variant = families()["attention_flash_q8_0_rows"].variant(rows=8, head_dim=256)
    plan = TilePlan(variant, device, check_verify(device, *arrays[:3]), case.ctx)
    plan.run(*arrays, out)
    tile, merge = plan._batches[0]

    def bare() -> None:
        for bound in (tile, merge):
            run(bound, device)

    driver = device.driver
    from ..binding import kernel

    functions = [(kernel(b.variant, device)[0], b.grid, b.variant.threads, b.args) for b in (tile, merge)]

    def driver_only() -> None:
        import ctypes

        for function, grid_of, threads, args in functions:
            driver.launch(function, grid_of, threads, ctypes.addressof(args.pointers), 0)

    return {
        "plan_run_us": _host_us(device, lambda: plan.run(*arrays, out)),
        "bound_launches_us": _host_us(device, bare),
        "driver_launches_us": _host_us(device, driver_only),
        "bind_us": _host_us(device, lambda: bind(variant, _views(tile), **_scalars(tile))),
    }


def _views(bound: Any) -> Any:
    from ..runtime import View

    return {n: View(0, shape, dtype, True, dtype) for n, (dtype, shape) in bound.shapes.items()}


def _scalars(bound: Any) -> dict[str, Any]:
    names = [a.name for a in bound.variant.args if a.name not in bound.shapes] + list(bound.variant.family.extents)
    return {n: getattr(bound.symbols, n) for n in names}


def _host_us(device: GpuDevice, call: Any) -> float:
    samples = []
    for _ in range(40):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            call()
        samples.append((time.perf_counter() - start) / 10 * 1e6)
    return round(statistics.median(samples), 2)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", choices=("parity", "sanitize", "host", "table", "peers"))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="d256, 16 rows only")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    device = open_device(options.device)
    if not isinstance(device, GpuDevice):
        parser.error(f"{options.device} is no GPU")
    print(device.describe(), flush=True)
    failed = False
    for section in options.sections:
        start = time.perf_counter()
        report: Any
        if section == "parity":
            report = parity(options.device)
            failed |= _summarise_parity(report)
        elif section == "sanitize":
            report = sanitize(options.device)
            print(report)
        elif section == "host":
            report = host_time(device)
            print(report)
        elif section == "table":
            rows, dims = ((16,), (256,)) if options.quick else (kernels.ROWS, kernels.HEAD_DIMS)
            shapes = [kernels.Shape(c, b, d) for d in dims for b in rows for c in kernels.CONTEXTS]
            report = {**kernels.provenance(device), "rows": kernels.table(device, shapes, rounds=30)}
        else:
            report = peers.measure(device, quick=options.quick)
        (options.out / f"{section}.json").write_text(json.dumps(report, indent=1) + "\n")
        print(f"-- {section}: {time.perf_counter() - start:.1f} s", flush=True)
    sys.exit(failed)


def _summarise_parity(report: dict[str, Any]) -> bool:
    failed = [line for r in report["grid"] for line in r["failed"]]
    cases = sum(r["cases"] for r in report["grid"])
    worst = max((r["worst"], r["variant"]) for r in report["grid"] if not r["variant"].startswith("kv_"))
    print(f"parity: {cases} cases, {len(failed)} failed, worst {worst}; bits {report['bits']}; 2^31 {report['beyond_2_31']:.2e}")
    for line in failed[:20]:
        print(" ", line)
    return bool(failed) or not all(report["bits"].values()) or report["beyond_2_31"] > 1e-5


if __name__ == "__main__":
    main()
