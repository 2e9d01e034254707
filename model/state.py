"""The warm state of one conversation: what the target and the proposer hold of its tokens, and how it goes back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hipfire_kernels.model.attention import Attention
from hipfire_kernels.model.layers import BLOCK_ROWS, Array
from hipfire_kernels.model.prefix import PREFILL_ROWS, TAIL_ROWS, Checkpoints, chunk_ends, common_prefix
from hipfire_kernels.model.proposer import Draft
from hipfire_kernels.model.qwen35 import Snapshot, Target


@dataclass(frozen=True)
class Window:
    """The last verified block, as long as the recurrent layers hold its tape.

    Attributes:
        before: the recurrent state before it.
        block: the anchor and the drafts.
    """

    before: Snapshot
    block: tuple[int, ...]

    def leads_to(self, tokens: Sequence[int]) -> bool:
        """Whether `tokens` are those before the block and then one or more of it, the anchor first."""
        inside = tuple(tokens[self.before.length :])
        return 0 < len(inside) == common_prefix(inside, self.block)


class WarmState:
    """One token sequence, covered alike by all layers of the target and by the proposer.

    Attributes:
        tokens: what is covered.
        target_state: the target's layers.
        attention: who attends, with the KV caches' device.
        session: the proposer, None without.
        window: the last block, None where it cannot be gone back into.
        holder: the request that the sequence ends with.
    """

    def __init__(self, target: Target, draft: Draft | None, attention: Attention, checkpoints: int) -> None:
        self.tokens: list[int] = []
        self.target_state = target.new_state(attention)
        self.attention = attention
        self.session = draft.session(target, attention) if draft else None
        self.window: Window | None = None
        self.holder: object = None
        self._target = target
        self._tap_ids = draft.tap_ids if draft else ()
        self._checkpoints = Checkpoints(checkpoints)
        self._open_block: tuple[int, ...] = ()
        self._open_taps: Array | None = None

    def align(self, tokens: Sequence[int]) -> int:
        """Go back to the longest prefix of `tokens`, short of all, that the state can have; its length."""
        shared = common_prefix(tokens, self.tokens)
        if shared < len(self.tokens) or shared == len(tokens):
            saved = self._checkpoints.latest(min(shared, len(tokens) - 1))
            if saved is None:
                self.reset()
            else:
                self.target_state.restore(saved)
                self._shorten(saved.length)
        return len(self.tokens)

    def prefill(self, tokens: Sequence[int]) -> Iterator[Array]:
        """Cover `tokens`, which begin with what is covered; gives the logits [1, vocab] after each pass."""
        begin, tail = len(self.tokens), TAIL_ROWS if self._checkpoints.limit else 0
        self._save_checkpoint(1)
        for end in chunk_ends(begin, len(tokens), PREFILL_ROWS, tail):
            logits = self._process(tokens[len(self.tokens) : end])
            self._save_checkpoint(1)
            yield logits

    def refill(self, tokens: Sequence[int], prompt: int) -> int:
        """Cover exactly `tokens` by processing them again, the first `prompt` of them as a prompt; how many were.

        The others in passes whose rows are independent of each other: bit for bit what decoding left.
        """
        begin = self.align(tokens)
        for _ in self.prefill(tokens[:prompt]):
            pass
        for end in chunk_ends(len(self.tokens), len(tokens), BLOCK_ROWS):
            self._process(tokens[len(self.tokens) : end])
        return len(tokens) - begin

    def verify(self, anchor: int, drafts: Sequence[int]) -> Array:
        """Logits [1 + len(drafts), vocab] of a block. Then `keep` says how much of it becomes part of the sequence."""
        block = (anchor, *drafts)
        before = self.target_state.snapshot() if drafts else None
        out = self._target.forward(
            block, self.target_state, tap_ids=self._tap_ids, all_logits=True, record=bool(drafts)
        )
        self.window = Window(before, block) if before else None
        self._open_block, self._open_taps = block, out.taps
        return out.logits

    def keep(self, count: int) -> None:
        """Take the block's first `count` tokens into the sequence and undo the others: no KV cache is touched, the
        recurrent layers go back to before the block and step through the tape of these tokens again."""
        if self._open_taps is None:
            raise RuntimeError("keep without a verified block")
        if self.window and count < len(self._open_block):
            self.target_state.rollback(self.window.before, count)
        self._append(self._open_block[:count], self._open_taps[:count])
        self._open_taps = None
        self._save_checkpoint(PREFILL_ROWS)

    def replay(self, window: Window, length: int) -> None:
        """Go back to the first `length` tokens, which end inside the last block, through its tape."""
        self.target_state.rollback(window.before, length - window.before.length)
        self._shorten(length)
        self.window = window
        covered = {length, self.target_state.length, *([self.session.length] if self.session else [])}
        if len(covered) > 1:
            raise RuntimeError(f"after a replay to {length} tokens the models cover {covered}")

    def reset(self) -> None:
        """Cover nothing: the next request is cold."""
        self.target_state.reset()
        self._shorten(0)
        self._open_taps = None

    def _process(self, tokens: Sequence[int]) -> Array:
        """Take the next tokens in, in one pass; the logits [1, vocab] after them."""
        out = self._target.forward(tokens, self.target_state, tap_ids=self._tap_ids)
        self.window = None
        self._append(tokens, out.taps)
        return out.logits

    def _append(self, tokens: Sequence[int], taps: Array) -> None:
        if self.session:
            self.session.extend(tokens, taps)
        self.tokens += tokens

    def _shorten(self, length: int) -> None:
        del self.tokens[length:]
        if self.session:
            self.session.crop(length)
        self._checkpoints.drop_beyond(length)
        self.window = None

    def _save_checkpoint(self, distance: int) -> None:
        if self._checkpoints.limit and len(self.tokens) - self._checkpoints.last >= distance:
            self._checkpoints.add(self.target_state.snapshot())
