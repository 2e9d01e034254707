"""The engine: pairs a target with a draft, and opens conversations."""

from __future__ import annotations

import logging
from collections.abc import Callable

from hipfire_kernels.errors import CheckpointError, InputError
from hipfire_kernels.model.adaptive import Prices
from hipfire_kernels.model.attention import KV_FORMATS, make_attention
from hipfire_kernels.model.conversation import Conversation, Requests
from hipfire_kernels.model.layers import BLOCK_ROWS
from hipfire_kernels.model.loop import Generation
from hipfire_kernels.model.proposer import Draft
from hipfire_kernels.model.qwen35 import Target
from hipfire_kernels.model.repair import REPAIR_DESIGNS, RepairDesign
from hipfire_kernels.model.request import Limits, Request
from hipfire_kernels.model.sampling import is_whole
from hipfire_kernels.model.state import WarmState
from hipfire_kernels.running.devices import device as open_device

_log = logging.getLogger(__name__)


class Engine(Requests):
    """Decoding of one target, speculative when it has a draft.

    Speculation loses nothing: the same tokens when greedy, tokens of the same distribution when sampled. On the host
    that holds to the bit. On a device where another route runs a block than a single token it holds up to the rounding
    of the two: at most 2e-6 of an attention output in the f32 kernels, 7e-4 in verify_mma.

    `generate` and `stream` run requests on their own; `conversation` opens one whose requests share what they have
    in common. The engine itself holds no state but the prices that speculation was seen to have: any number of
    threads may use it, each its own requests and conversations.

    Args:
        target: from `load_target`.
        draft: from `load_draft`, or `NgramDraft()`; None to decode token by token. Or a function that loads one: where
            that fails, requests with speculation="on" do too, and those with "auto" decode token by token and say why
            (`GenerationResult.fallback`).
        device: where the attention kernels run, as for `hipfire_kernels.device`.
        kv_format: "q8_0": Q8_0 KV cache and the kernels of this library. "f32": plain numpy attention, for
            parity with other implementations; runs on "host" only.
        repair: what becomes of the state after a stop inside a block. "replay": it goes back to exactly the tokens
            that were used. "reset": it is dropped, and the conversation's next request is cold.

    Raises:
        CheckpointError: the draft was made for another target.
        InputError: unknown kv_format or repair, or a kv_format that the device or the target cannot have.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | Callable[[], Draft] | None = None,
        *,
        device: str = "host",
        kv_format: str = "q8_0",
        repair: RepairDesign = "replay",
    ) -> None:
        _check_word("kv_format", kv_format, KV_FORMATS)
        _check_word("repair", repair, REPAIR_DESIGNS)
        if kv_format == "f32" and device != "host":
            raise InputError(f"kv_format 'f32' is plain numpy and runs on 'host', not on {device!r}; use 'q8_0' there")
        self.target = target
        self.draft, self._fallback = _paired(draft, target)
        self.kv_format = kv_format
        self._repair = repair
        self._device = open_device(device)
        self._prices = Prices()

    @property
    def limits(self) -> Limits:
        """What can be asked for."""
        return Limits(self.target.config, self.draft.block_size if self.draft else None, self._fallback)

    def conversation(self, *, checkpoints: int = 8) -> Conversation:
        """Open a conversation.

        Args:
            checkpoints: the most snapshots of the recurrent state that are kept, to go back to where a later prompt
                leaves the earlier ones. Each takes the memory of all DeltaNet states. With 0, such prompts are cold.
        """
        if not is_whole(checkpoints) or checkpoints < 0:
            raise InputError(f"checkpoints is {checkpoints!r}; legal are whole numbers from 0")
        return self._open(self.draft, checkpoints)

    def start(self, request: Request) -> Generation:
        """Run a checked request on its own, step by step."""
        return self._open(self.draft if request.block_size > 1 else None, 0).start(request)

    def _open(self, draft: Draft | None, checkpoints: int) -> Conversation:
        attention = make_attention(self.kv_format, self._device)
        warm = WarmState(self.target, draft, attention, checkpoints)
        return Conversation(warm, self.limits, self._repair, self._prices)


def _paired(draft: Draft | Callable[[], Draft] | None, target: Target) -> tuple[Draft | None, str | None]:
    """The draft, checked, or why there is none although one was asked for."""
    if not callable(draft):
        if draft is not None:
            _check_draft(draft, target)
        return draft, None
    try:
        loaded = draft()
        _check_draft(loaded, target)
    except CheckpointError as error:
        _log.warning("decoding goes on without a draft: %s", error)
        return None, f"the draft cannot be used: {error}"
    return loaded, None


def _check_draft(draft: Draft, target: Target) -> None:
    draft.check_pairing(target.config)
    if not 2 <= draft.block_size <= BLOCK_ROWS:
        raise CheckpointError(
            f"the draft's block_size is {draft.block_size}; a verify block has 2 to {BLOCK_ROWS} rows"
        )


def _check_word(name: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise InputError(f"{name} is {value!r}; legal are {', '.join(map(repr, legal))}")
