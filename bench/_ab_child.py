"""One sample of an A/B run, in a process of its own: a job as JSON on stdin, what was found as the last line of stdout.

The kernel or the request runs once unrecorded, then recorded. A process that is traced gives no time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

from hipfire_kernels.bench import pinned
from hipfire_kernels.bench.kernels import Shape, random_cache
from hipfire_kernels.building.builder import build
from hipfire_kernels.checking import declared
from hipfire_kernels.checking.oracle import oracle_of
from hipfire_kernels.errors import HipfireError
from hipfire_kernels.inspecting import compare
from hipfire_kernels.running.attention import check_verify, verify_plan
from hipfire_kernels.running.devices import device as open_device
from hipfire_kernels.running.devices.protocol import Device
from hipfire_kernels.running.timing import timer
from hipfire_kernels.testing.case import variant_named

Found = dict[str, Any]


def main() -> None:
    """Run the job and print what it gave, or the error of the library that it ended with."""
    job = json.load(sys.stdin)
    traced = pinned.tracer()
    try:
        on = open_device(job["device"])
        found = {"kernel": _kernel, "case": _case, "generate": _generate}[job["mode"]](job, on)
        found |= {
            "clocks": pinned.clocks(on.name),
            "code": pinned.code_digest(),
            "records": pinned.records(job["but"]),
            "environment": pinned.environment(os.environ, job["but"]),
            "machine": pinned.device_facts(on),
            "traced": traced,
        }
        if traced:
            found |= {"value": None, "spread": None}
    except HipfireError as error:
        found = {"error": {"kind": type(error).__name__, "message": str(error)}}
    print(json.dumps(found))


def shape_arrays(shape: Shape) -> tuple[Any, Any, Any, Any]:
    """Query, K cache, V cache and positions of a shape; the same in every process."""
    rng = np.random.default_rng(shape.ctx + shape.rows)
    q = rng.standard_normal((shape.rows, shape.n_heads, shape.head_dim), np.float32)
    k, v = random_cache(rng, shape), random_cache(rng, shape)
    return q, k, v, np.arange(shape.ctx - shape.rows, shape.ctx, dtype=np.int32)


def _kernel(job: Found, on: Device) -> Found:
    """Median microseconds of a call of one variant, and the output of the buffer that was timed.

    Job: `entry`, `shape`, `rows` (how many of the last rows are called), `rounds`, `out` (where the output goes).
    """
    shape = Shape(**job["shape"])
    variant = variant_named(job["entry"])
    q, k, v, positions = shape_arrays(shape)
    query, keys, values, at = (
        on.to_device(np.ascontiguousarray(a)) for a in (q[-job["rows"] :], k, v, positions[-job["rows"] :])
    )
    out = on.to_device(np.full((job["rows"], *q.shape[1:]), np.nan, np.float32))
    plan = verify_plan(variant, on, check_verify(on, query, keys, values), shape.ctx)
    calls = {"call": lambda: plan.run(query, keys, values, at, out)}
    times = timer(on).interleaved(calls, job["rounds"], warmup=1)["call"]
    output = on.to_host(out)
    np.save(job["out"], output)
    return {
        "value": times.median,
        "spread": times.spread,
        "output": pinned.sha256(output.tobytes()),
    }


def _case(job: Found, on: Device) -> Found:
    """Median microseconds of a launch on a case of a declaration, what it wrote, and how right that is.

    Job: `entry`, `case` (its fields), `rounds`.
    """
    variant = variant_named(job["entry"])
    oracle = oracle_of(variant)
    case = oracle.read(variant, job["case"])
    finding = oracle.check(variant, case, on)
    sides = {"call": compare.Build(variant, build(variant, on.arch.name, on.toolchain))}
    times = compare.times(sides, case, on, job["rounds"])["call"]
    written, _ = declared.run(variant, case, on)
    return {
        "value": times.median,
        "spread": times.spread,
        "output": pinned.sha256(b"".join(array.tobytes() for array in written.values())),
        "worst": finding.error,
        "wrong": "" if finding.ok else finding.describe(),
    }


def _generate(job: Found, on: Device) -> Found:
    """Seconds a token of a request after its first, which comes from the prefill; and what it produced.

    Job: `target`, `draft` (or None), `kv_format`, `blas_threads` (or None), `prompt` (ids), `max_new_tokens`,
    `block_size` (or None).
    """
    from threadpoolctl import threadpool_limits

    from hipfire_kernels.model import Engine, load_draft, load_target

    draft = load_draft(job["draft"]) if job["draft"] else None
    engine = Engine(load_target(job["target"]), draft, device=on.name, kv_format=job["kv_format"])
    with threadpool_limits(job["blas_threads"]):
        for _ in range(2):  # the first is not recorded
            generation = engine.stream(
                job["prompt"],
                job["max_new_tokens"],
                block_size=job["block_size"],
                # "auto" goes by the clock, and no two runs are alike.
                speculation="on" if draft is not None and job["block_size"] != 1 else "off",
            )
            began = time.perf_counter()
            next(generation)
            decoding = time.perf_counter()
            for _ in generation:
                pass
            ended = time.perf_counter()
    result = generation.result
    decoded = len(result.tokens) - 1
    return {
        "value": (ended - decoding) / decoded if decoded else None,
        "spread": None,
        "prefill_seconds": decoding - began,
        "tokens": [int(t) for t in result.tokens],
        "cycles": result.cycles,
        "tau": result.tau,
        "stop_reason": result.stop_reason,
        "routes": dict(result.routes),
        "graph": dict(result.attention.graph),
        "capped_cycles": result.capped_cycles,
    }


if __name__ == "__main__":
    main()
