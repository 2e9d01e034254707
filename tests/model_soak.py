"""Random requests on warm conversations, every one compared with a cold run of plain decoding.

Run as `python tests/model_soak.py 10000 [SEED]` for the long form; `test_model_soak.py` runs a short one. Prompts are
fed in passes of at most BLOCK_ROWS tokens, in which rows are independent bit for bit: so not only the tokens but all
of a warm state must equal that of a cold run, and no near-tie of two logits can excuse a difference.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from model_lab import DRAFT, TARGET, OracleDraft, draft_tensors, target_tensors, write_checkpoint

from hipfire_kernels import InputError
from hipfire_kernels.model import Conversation, Engine, Generation, load_draft, load_target
from hipfire_kernels.model.layers import BLOCK_ROWS
from hipfire_kernels.model.prefix import TAIL_ROWS
from hipfire_kernels.model.qwen35 import Target

CAPACITY, VOCAB, BLOCK = TARGET["max_position_embeddings"], 94, 8


class Room:
    """One conversation after the other, of one engine."""

    def __init__(self, engine: Engine, oracle: OracleDraft | None, repair: str) -> None:
        self.engine, self.oracle, self.repair = engine, oracle, repair
        self.busy = False
        self.open()

    def open(self, checkpoints: int = 8) -> None:
        self.conversation: Conversation = self.engine.conversation(checkpoints=checkpoints)
        self.checkpoints = checkpoints
        self.history: list[int] = []
        self.prompt: list[int] = []


class Soak:
    """The rooms, the random choices, and what was counted."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        target = load_target(write_checkpoint(folder / "target", TARGET, target_tensors(TARGET)))
        draft = load_draft(write_checkpoint(folder / "draft", DRAFT, draft_tensors(DRAFT)))
        self.cold = Engine(target, kv_format="f32")
        self.counts: Counter[str] = Counter()
        self.shared = [self.tokens(int(self.rng.integers(5, 90))) for _ in range(5)]
        self.rooms = [self.room(target, "replay"), self.room(target, "replay"), self.room(target, "reset")]
        self.rooms.append(Room(Engine(target, draft, kv_format="f32"), None, "replay"))
        self.rooms.append(Room(Engine(target, kv_format="f32"), None, "replay"))

    def room(self, target: Target, repair: Any) -> Room:
        oracle = OracleDraft(BLOCK, lambda: int(self.rng.integers(0, BLOCK)))
        return Room(Engine(target, oracle, kv_format="f32", repair=repair), oracle, repair)

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def tokens(self, count: int) -> list[int]:
        return [int(t) for t in self.rng.integers(0, VOCAB, count)]

    def prompt(self, room: Room, new: int) -> list[int]:
        """The next turn, the same prompt again, one that leaves the history somewhere, or another beginning."""
        kind, said = self.rng.random(), self.tokens(int(self.rng.integers(1, 12)))
        history = room.history
        if kind < 0.55 and history:
            prompt = [*history, *said]
        elif kind < 0.65 and room.prompt:
            prompt = room.prompt
        elif kind < 0.8 and history:
            prompt = [*history[: int(self.rng.integers(0, len(history) + 1))], *said]
        else:
            prompt = [*self.shared[int(self.rng.integers(len(self.shared)))], *said]
        return prompt if len(prompt) + new <= CAPACITY else said

    def mode(self, room: Room) -> dict[str, Any]:
        """How much is speculated. Not "auto": it goes by the clock, and a run could not be repeated."""
        if room.engine.draft is None:
            return {}
        block = None if self.chance(0.6) else int(self.rng.integers(2, BLOCK + 1))
        return {
            "speculation": "on" if self.chance(0.75) else "off",
            "block_size": block,
            "adaptive_b": self.chance(0.3),
        }

    def request(self, room: Room) -> Iterator[None]:
        """One request, with a pause after each cycle."""
        if self.chance(0.003):
            room.open(int(self.rng.integers(0, 9)))
        new = int(self.rng.integers(1, 40)) if self.chance(0.3) else int(self.rng.integers(1, 12))
        prompt = self.prompt(room, new)
        mode = self.mode(room)
        sampling: dict[str, Any] = {}
        if self.chance(0.2):
            sampling = {"temperature": 1.0, "seed": int(self.rng.integers(99)), "top_k": 20}
            self.counts["sampled"] += 1
        truth = self.cold.generate(prompt, new, (), **sampling).tokens
        if room.oracle:
            room.oracle.sequence = [*prompt, *truth]
        stop = [truth[int(self.rng.integers(len(truth)))]] if self.chance(0.5) else []
        before = room.conversation.tokens
        generation = room.conversation.stream(prompt, new, stop, **sampling, **mode)
        resumed = yield from self.steps(room, generation, sampled=bool(sampling))
        self.check(room, generation, prompt, truth, before, stop)
        assert resumed or generation.result.replayed_tokens <= 2 * BLOCK
        room.busy = False

    def steps(self, room: Room, generation: Generation, sampled: bool) -> Generator[None, None, bool]:
        """Iterate, and now and then end it early or try what must be refused; whether it went on after a truncation."""
        resumed = False
        last = -1 if self.chance(0.5) else int(self.rng.integers(0, 3))
        kind = self.rng.random()
        for cycle, part in enumerate(generation):
            yield
            if self.chance(0.05):
                self.refused(room, busy=generation.result.stop_reason is None)
            if cycle == last and kind < 0.3:
                generation.cancel()
            elif cycle == last and kind < 0.85:
                resumed = not sampled and self.chance(0.5)
                generation.truncate(int(self.rng.integers(1, len(part) + 1)), resume=resumed)
            elif cycle == last:
                self.break_it(generation)
        return resumed

    def refused(self, room: Room, busy: bool) -> None:
        before = room.conversation.tokens
        for arguments in [([], 2), ([1] * CAPACITY, 9), ([1], 2, [999]), (self.tokens(3), 2)][: 3 + busy]:
            try:
                room.conversation.generate(*arguments)  # type: ignore[arg-type]
            except InputError:
                self.counts["refused"] += 1
            else:
                raise AssertionError(f"{arguments} ran")
        assert room.conversation.tokens == before

    def break_it(self, generation: Generation) -> None:
        """The next cycle fails with the layers at different tokens."""
        forward = Target.forward

        def broken(self: Target, tokens: Sequence[int], state: Any, **options: Any) -> Any:
            forward(self, tokens, state, **options)
            state.delta_states()[0].reset()
            raise MemoryError

        with mock.patch.object(Target, "forward", broken):
            try:
                next(generation, None)
            except MemoryError:
                self.counts["broken"] += 1

    def check(
        self,
        room: Room,
        generation: Generation,
        prompt: list[int],
        truth: list[int],
        before: tuple[int, ...],
        stop: list[int],
    ) -> None:
        result, resident = generation.result, room.conversation.tokens
        got = result.tokens
        # The tokens, in every bit a cold run's, and where they end.
        assert got == truth[: len(got)]
        ended = {"stop": got[-1:] == stop, "length": len(got) == len(truth)}
        assert ended.get(str(result.stop_reason), len(got) <= len(truth))
        assert not set(got[:-1]) & set(stop)
        # What was taken over: all that was resident where the prompt goes on from it, nothing it does not share.
        shared = next((i for i, (a, b) in enumerate(zip(prompt, before, strict=False)) if a != b), None)
        shared = min(len(prompt), len(before)) if shared is None else shared
        hit = shared == len(before) < len(prompt)
        assert result.cached_prefix <= min(shared, len(prompt) - 1)
        assert result.cached_prefix == shared or not hit
        answer = len(room.history) - len(room.prompt)
        if room.checkpoints > 1 and prompt == room.prompt and shared == len(prompt) and answer < BLOCK_ROWS:
            assert result.cached_prefix >= len(prompt) - TAIL_ROWS
        assert result.cached_prefix + result.prefill_tokens == len(prompt)
        # What is left, and what that took.
        lost = result.repair == "reset" or result.stop_reason == "failed"
        assert resident == (() if lost else (*prompt, *got[:-1]))
        assert (result.repair == "reset") <= (room.repair == "reset")
        assert (result.replayed_tokens > 0) >= (result.repair == "replayed")
        room.prompt, room.history = prompt, [*prompt, *got]
        kind = "hit" if hit and shared else "rewind" if result.cached_prefix else "cold"
        self.counts.update(
            ["requests", f"prefix {kind}", f"end {result.stop_reason}", f"repair {result.repair}"],
        )
        for name in ("cached_prefix", "prefill_tokens", "replayed_tokens", "cycles"):
            self.counts[name] += getattr(result, name)
        self.counts["tokens"] += len(got)

    def run(self, requests: int) -> Iterator[int]:
        """Up to three requests at a time, in different rooms, one cycle of one of them after the other."""
        running: list[Iterator[None]] = []
        started = 0
        while started < requests or running:
            free = [room for room in self.rooms if not room.busy]
            if started < requests and (not running or (len(running) < 3 and self.chance(0.3))):
                room = free[int(self.rng.integers(len(free)))]
                room.busy = True
                running.append(self.request(room))
                started += 1
                yield started
            at = int(self.rng.integers(len(running)))
            if next(running[at], self) is self:
                del running[at]


def soak(folder: Path, requests: int, seed: int = 0) -> Iterator[tuple[int, Counter[str]]]:
    """Run; gives (requests started, counts so far) at each start."""
    with mock.patch("hipfire_kernels.model.state.PREFILL_ROWS", BLOCK_ROWS):
        lab = Soak(folder, seed)
        for started in lab.run(requests):
            yield started, lab.counts
        assert lab.counts["requests"] == requests


def resident_mib() -> float:
    """Memory of this process; needs /proc."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    requests, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for started, seen in soak(Path(folder), requests, seed):
            counts = seen
            if started % max(1, requests // 10) == 0:
                gc.collect()
                print(
                    f"{started:6} requests  {time.perf_counter() - begin:6.0f} s  {resident_mib():6.1f} MiB", flush=True
                )
    for name, count in sorted(counts.items()):
        print(f"{name:24} {count}")


if __name__ == "__main__":
    main()
