"""The shards of a campaign as tasks of a Ray cluster that is already there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from hipfire_kernels.errors import DeviceError
from hipfire_kernels.testing import campaign
from hipfire_kernels.testing.case import FuzzCase, variant_named
from hipfire_kernels.testing.casefile import case_from


def run_shards(settings: campaign.Settings, known: Sequence[FuzzCase]) -> list[dict[str, Any]]:
    """Run every shard of a campaign as a task, each with the settings' jobs as its CPUs; their results.

    The library must be installed on the nodes. A node's device is that of the settings.

    Raises:
        DeviceError: Ray is not installed, or there is no cluster to connect to.
    """
    try:
        import ray
    except ImportError as error:
        raise DeviceError(
            f"--ray needs Ray, which is not installed ({error}); pip install ray, or use --shard"
        ) from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise DeviceError(f"no Ray cluster is at hand ({error}); start one with `ray start --head`") from None
    task = ray.remote(num_cpus=settings.jobs, num_gpus=0 if settings.device == "host" else 1)(run_one)
    plan = pack(settings)
    cases = [case.as_dict() for case in known]
    running = [task.remote({**plan, "shard": index}, cases) for index in range(settings.shards)]
    results: list[dict[str, Any]] = [json.loads(text) for text in ray.get(running)]
    return results


def pack(settings: campaign.Settings) -> dict[str, Any]:
    """Settings as plain values: kernel declarations hold functions, which do not travel."""
    values = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    return {**values, "variants": [v.entry for v in settings.variants]}


def run_one(plan: dict[str, Any], known: list[dict[str, Any]]) -> str:
    """One shard, on whatever machine this runs: its `Outcome` as JSON."""
    variants = tuple(variant_named(name) for name in plan["variants"])
    settings = campaign.Settings(**{**plan, "variants": variants})
    return json.dumps(campaign.run(settings, [case_from(case) for case in known]).as_dict())
