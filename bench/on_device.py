"""Everything that needs a GPU, in one call: parity, sanitizers, host time of a plan, the kernel table, peers, A/B runs.

    python -m hipfire_kernels.bench.on_device --device cuda:0 --out DIR parity sanitize host table peers

Each section prints a short summary and leaves its figures in DIR as JSON. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from hipfire_kernels import attend, families, kv_write, load, quantize_q8_0
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.bench import ab_card, draft, kernels, peers
from hipfire_kernels.checking import reference
from hipfire_kernels.checking.matrix_probe import probe
from hipfire_kernels.checking.numbers import worst_row
from hipfire_kernels.checking.oracle import check
from hipfire_kernels.checking.parity import Case, grid, inputs, run_attend, tile_twin
from hipfire_kernels.dispatch import AttendRequest, plan
from hipfire_kernels.errors import DeviceError
from hipfire_kernels.kernels.arguments import ATTEND
from hipfire_kernels.layout import Q8_BLOCK, Q8_BYTES
from hipfire_kernels.running.attention import check_verify, verify_plan
from hipfire_kernels.running.devices import device as open_device
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.devices.protocol import Device
from hipfire_kernels.testing import VariantSubject, campaign, variant_of
from hipfire_kernels.testing import check as check_case
from hipfire_kernels.testing.axes import generate

LONG = (32768, 131072)
FAR = 4_250_000
"""Positions of a cache of 2.3 GB a tensor."""

HOST_CASE = Case(16, 4096, 24, 4, 256)
TURNS = 60
"""How often each call's host time is taken."""

NEW_TOKENS = 64
GRAPH_CASE = Case(16, 4400, 24, 4, 128)
GRAPH_ROUTES = ("tile_batched", "verify_gqa", "verify_mma")
AB = tuple(f"ab-{part}" for part in ab_card.PARTS)
SECTIONS = ("parity", "sanitize", "host", "model", "arrays", "table", "draft", "peers", *AB)


def variants() -> list[Variant]:
    """Every shipped variant."""
    return [v for family in families().values() for v in family.variants()]


def parity(device_name: str) -> dict[str, Any]:
    """The full grid for every variant, long contexts for the tuned ones, offsets beyond 2^31, the rows' bits.

    Threads, not processes: the oracles release the interpreter, and a GPU shared by processes serves them in turn.
    """
    device = open_device(device_name)
    jobs: list[tuple[list[Variant], list[Case]]] = [([v], list(grid(v))) for v in variants()]
    jobs += list(_long_jobs())
    with threadpool_limits(1), concurrent.futures.ThreadPoolExecutor(12) as pool:
        reports = list(pool.map(lambda job: _run_cases(device, *job), sorted(jobs, key=_longest_first)))
    return {
        "grid": reports,
        "bits": _row_bits(device),
        "beyond_2_31": _beyond_two_to_the_31(device),
        "matrix": probe(device),
    }


def _longest_first(job: tuple[list[Variant], list[Case]]) -> int:
    return -max(case.ctx for case in job[1])


def _long_jobs() -> Iterator[tuple[list[Variant], list[Case]]]:
    """Contexts of 32,768 and 131,072: one set of inputs for all variants that take it."""
    attending = [v for v in variants() if v.family.oracle == ATTEND]
    for head_dim, ctx in itertools.product((128, 256), LONG):
        for mask, rows in (("causal", 5), ("causal", 32), ("window", 16), ("tree", 16)):
            takers = [v for v in attending if v.head_dim == head_dim and dict(v.params).get("mask", "causal") == mask]
            window, columns = (ctx * 5 // 8 if mask == "window" else 0), (rows if mask == "tree" else 0)
            if takers:
                yield takers, [Case(rows, ctx, 12, 2, head_dim, window=window, block_cols=columns, seed=ctx + rows)]


def _run_cases(device: Device, takers: list[Variant], cases: list[Case]) -> dict[str, Any]:
    results = [check(variant, case, device) for case in cases for variant in takers]
    failed = [r.describe() for r in results if not r.ok]
    names = ", ".join(v.name for v in takers)
    return {
        "variant": names,
        "longest": max(c.ctx for c in cases),
        "cases": len(results),
        "worst": max(r.error for r in results),
        "failed": failed,
    }


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
    """Worst error of a windowed row at the end of a cache of `FAR` positions, written there by the KV kernel."""
    capacity, window = FAR, 90
    k_cache, v_cache = (device.to_device(np.zeros((capacity, 2, 8, 34), np.uint8)) for _ in range(2))
    rng = np.random.default_rng(9)
    new = rng.standard_normal((200, 2, 256), np.float32)
    slots = np.arange(capacity - 200, capacity, dtype=np.int32)
    kv_write(device.to_device(new), device.to_device(new), k_cache, v_cache, slots, device=device)
    tail = quantize_q8_0(new)
    q = rng.standard_normal((1, 2, 256), np.float32)
    got = attend(device.to_device(q), k_cache, v_cache, slots[-1:], window=window)
    return worst_row(device.to_host(got), reference.attend(q, tail, tail, np.array([199]), window=window))


MMA, GQA = "attention_verify_mma_q8", "attention_verify_gqa_q8"
SANITIZED = (("memcheck", MMA), ("memcheck", GQA), ("memcheck", "others"), ("racecheck", GQA), ("racecheck", "others"))
"""Tools and families of a process each, which run side by side. racecheck does not follow named barriers of a part of a
block: in verify_mma it reports hazards between accesses that one separates."""

SANITIZE_LIMIT_S = 280


def one_case_each(device_name: str, families_of: str) -> None:
    """What a sanitizer runs: the known cases of `hfk fuzz` and a drawn one of every variant, of a family or of the
    `others`."""
    device = open_device(device_name)
    chosen = [v for v in variants() if (v.family.name if v.family.name in (MMA, GQA) else "others") == families_of]
    known = [case for case in campaign.ledger() if variant_of(case) in chosen]
    for case in [*known, *itertools.islice(generate(chosen, seed=3), len(chosen))]:  # the first turn has one of each
        found = check_case(case, VariantSubject(variant_of(case), device))
        if not found.ok:
            sys.exit(found.describe())


def sanitize(device_name: str) -> dict[str, str]:
    """compute-sanitizer over `one_case_each`: of each of `SANITIZED` its summary, what failed, or that it did not end.

    Raises:
        DeviceError: compute-sanitizer is not there.
    """
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        raise DeviceError("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")

    def run(check_name: str, families_of: str) -> str:
        program = f"from hipfire_kernels.bench.on_device import one_case_each as o; o({device_name!r}, {families_of!r})"
        argv = [tool, "--tool", check_name, "--error-exitcode", "9", sys.executable, "-c", program]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=SANITIZE_LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"did not end in {SANITIZE_LIMIT_S} s"
        lines = [line.strip("= ") for line in done.stdout.splitlines() if "SUMMARY" in line]
        lines += (done.stdout + done.stderr).splitlines()[-3:] if done.returncode else []
        return f"exit {done.returncode}: {' '.join(lines)}"

    with concurrent.futures.ThreadPoolExecutor(len(SANITIZED)) as pool:
        said = list(pool.map(lambda job: run(*job), SANITIZED))
    return {f"{tool_name} {families_of}": text for (tool_name, families_of), text in zip(SANITIZED, said, strict=True)}


def host_time(device: GpuDevice) -> dict[str, float]:
    """Host microseconds of one plan.run (two launches), and of two bare launches of the same kernels; of a loaded
    kernel's call, and of one bare launch."""
    case = HOST_CASE
    i = inputs(case)
    q, k, v, positions = (device.to_device(a) for a in (i.q, i.k_cache, i.v_cache, i.positions))
    out = device.empty(i.q.shape, np.float32)
    variant = families()["attention_flash_q8_0_rows"].variant(rows=8, head_dim=case.head_dim)
    plan = verify_plan(variant, device, check_verify(device, q, k, v), case.ctx)
    plan.run(q, k, v, positions, out)
    launches = plan.launches

    def bare() -> None:
        for (function, _), grid_of, threads, args, early in launches:
            device.driver.launch(function, grid_of, threads, args.address, 0, early)

    calls = {"plan_run_us": lambda: plan.run(q, k, v, positions, out), "two_launches_us": bare}
    if device.driver.vendor == "cuda":
        calls["two_cuda_bindings_launches_us"] = _bindings_call(launches)
    return {**_host_us(device, calls), **_callable_time(device)}


def _callable_time(device: GpuDevice) -> dict[str, float]:
    """Host microseconds of a loaded kernel's call with five arrays, of its bound launch, and of a bare launch."""
    rows, kv_heads, head_dim, capacity = 16, 4, 256, 64
    new = np.ones((rows, kv_heads, head_dim), np.float32)
    cache = (capacity, kv_heads, head_dim // Q8_BLOCK, Q8_BYTES)
    values = {name: device.to_device(new) for name in ("k", "v")}
    values |= {name: device.empty(cache, np.uint8) for name in ("k_cache", "v_cache")}
    values["positions"] = device.to_device(np.arange(rows, dtype=np.int32))
    kernel = load(families()["kv_cache_write_q8_0_batched"].variant(pair=True), device)
    bound = kernel.bind(**values)
    ((function, _), grid_of, threads, args, early) = bound.launch
    calls: dict[str, Callable[[], Any]] = {
        "callable_us": lambda: kernel(**values),
        "bound_us": bound,
        "one_launch_us": lambda: device.driver.launch(function, grid_of, threads, args.address, 0, early),
    }
    return _host_us(device, calls)


def _bindings_call(launches: Sequence[Any]) -> Callable[[], None]:
    """Two launches through cuda-bindings, with every object made beforehand."""
    from cuda.bindings import driver as cu

    stream = cu.CUstream(0)
    prepared = [(loaded[0], *grid_of, threads, args.address) for (loaded, _), grid_of, threads, args, _ in launches]

    def call() -> None:
        for function, x, y, z, threads, params in prepared:
            cu.cuLaunchKernel(function, x, y, z, threads, 1, 1, 0, stream, params, 0)

    return call


def _host_us(device: GpuDevice, calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Median host microseconds of each call, taken in turn."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            device.synchronize()
            start = time.perf_counter()
            for _ in range(10):
                call()
            samples[name].append((time.perf_counter() - start) / 10 * 1e6)
    return {name: round(statistics.median(found), 2) for name, found in samples.items()}


def model(device_name: str) -> dict[str, Any]:
    """The demo pair with its KV caches and all attention on the device. `tests/test_results.py` holds the tokens of the
    recorded run against the host's."""
    from hipfire_kernels.model import Engine, Tokenizer, demo_pair_path, demo_prompts, load_demo_pair

    target, draft = load_demo_pair()
    tokenizer = Tokenizer(demo_pair_path() / "target")
    engine = Engine(target, draft, device=device_name)
    rows = []
    for prompt in demo_prompts():
        found = engine.generate(tokenizer.encode(prompt), NEW_TOKENS, speculation="on", adaptive_b=False)
        rows.append(
            {
                "tau": found.tau,
                "routes": dict(found.routes),
                "graph": dict(found.attention.graph),
                "tokens": [int(t) for t in found.tokens],
            }
        )
    return {**open_device(device_name).describe(), "prompts": rows}  # type: ignore[attr-defined]


def arrays(device: GpuDevice) -> dict[str, Any]:
    """torch tensors in and out without a copy, on a stream of torch's; a captured graph replayed at other contexts."""
    import torch

    case = Case(8, 700, 8, 2, 128)
    i = inputs(case)
    want = reference.attend(i.q, i.k_cache, i.v_cache, i.positions)
    q, k, v, at = (torch.from_numpy(x).to(f"cuda:{device.index}") for x in (i.q, i.k_cache, i.v_cache, i.positions))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    found: dict[str, Any] = {}
    with torch.cuda.stream(side):
        got = attend(q, k, v, at)
        doubled = got * 2  # on the same stream, with nothing waited for
        given = torch.empty_like(q)
        attend(q, k, v, at, out=given, ctx=case.ctx)
    torch.cuda.synchronize()
    found["torch_kind"] = type(got).__name__
    found["torch_error"] = worst_row(got.cpu().numpy(), want)
    found["torch_same_stream"] = bool((doubled == got * 2).all()) and bool((given == got).all())
    found["graph_is_direct"] = {route: _graph(device, route) for route in GRAPH_ROUTES}
    return found


def _graph(device: GpuDevice, route: str) -> bool:
    """Capture once over the whole cache, replay at ten contexts: whether each has the bits of a direct call."""
    case = GRAPH_CASE
    i = inputs(case)
    q, k, v, at = (device.to_device(x) for x in (i.q, i.k_cache, i.v_cache, i.positions))
    request = AttendRequest(
        arch=device.arch.name, kv_format="q8_0", head_dim=case.head_dim, n_heads=case.n_heads,
        n_kv_heads=case.n_kv_heads, rows=case.rows, logical_ctx=case.ctx, layout="chain", capturing=True,
        recording=False,
    )  # fmt: skip
    captured = plan(request, device, capacity=i.k_cache.shape[0], route=route)
    out, direct = device.empty(i.q.shape, np.float32), device.empty(i.q.shape, np.float32)
    stream = device.stream()
    captured.run(q, k, v, at, out, stream=stream)  # builds and loads outside the capture
    stream.synchronize()
    with device.capture(stream) as graph:
        captured.run(q, k, v, at, out, stream=stream)
    same = []
    for last in np.linspace(case.rows, case.ctx, 10).astype(int):
        device.write(at, np.arange(last - case.rows, last, dtype=np.int32))
        graph.launch(stream)
        stream.synchronize()
        captured.run(q, k, v, at, direct)
        same.append(np.array_equal(device.to_host(out), device.to_host(direct)))
    return bool(all(same))


def main(argv: Sequence[str] | None = None) -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", choices=SECTIONS)
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
            failed |= not all(text.startswith("exit 0") for text in report.values())
            print(json.dumps(report, indent=1))
        elif section == "model":
            report = model(options.device)
            print([(row["tau"], row["routes"]) for row in report["prompts"]])
        elif section == "arrays":
            report = arrays(device)
            failed |= not (all(report["graph_is_direct"].values()) and report["torch_same_stream"])
            print(report)
        elif section == "host":
            report = host_time(device)
            print(report)
        elif section == "table":
            rows, dims = ((16,), (256,)) if options.quick else (kernels.ROWS, kernels.HEAD_DIMS)
            shapes = [kernels.Shape(c, b, d) for d in dims for b in rows for c in kernels.CONTEXTS]
            report = {**kernels.provenance(device), "rows": kernels.table(device, shapes, rounds=30)}
        elif section == "draft":
            report = draft.measure(device)
        elif section in AB:
            report = ab_card.on_card(options.device, (section.removeprefix("ab-"),))
        else:
            report = peers.measure(device, quick=options.quick)
        (options.out / f"{section}.json").write_text(json.dumps(report, indent=1) + "\n")
        print(f"-- {section}: {time.perf_counter() - start:.1f} s", flush=True)
    sys.exit(failed)


def _summarise_parity(report: dict[str, Any]) -> bool:
    failed = [line for r in report["grid"] for line in r["failed"]]
    cases = sum(r["cases"] for r in report["grid"])
    worst = max((r["worst"], r["variant"]) for r in report["grid"] if not r["variant"].startswith("kv_"))
    print(
        f"parity: {cases} cases, {len(failed)} failed, worst {worst}; bits {report['bits']}; "
        f"beyond 2^31 {report['beyond_2_31']:.2e}"
    )
    for line in failed[:20]:
        print(" ", line)
    for line in report["matrix"]:
        print("  matrix vocabulary:", line)
    return bool(failed or report["matrix"]) or not all(report["bits"].values()) or report["beyond_2_31"] > 1e-5


if __name__ == "__main__":
    main()
