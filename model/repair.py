"""What happens to the state when only a part of a block's tokens is used.

A block's accepted drafts and its bonus token are part of the sequence before anyone looks at them. When a stop among
them ends the request, the state covers more than was used. The repairs:

"replay", the default: the recurrent state from before the block is restored and steps through the anchor and all used
tokens but the last, which stays pending; the KV caches and the proposer are only cut. Its cost depends on the block
alone. Where what is asked for is not the end of the last block, or the replay fails, it is "reset".

"reset": everything is forgotten, and the next request is cold.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, get_args

from hipfire_kernels.model.result import GenerationResult
from hipfire_kernels.model.state import WarmState

RepairDesign = Literal["replay", "reset"]
REPAIR_DESIGNS: tuple[str, ...] = get_args(RepairDesign)

_log = logging.getLogger(__name__)


def repair_terminal(warm: WarmState, used: Sequence[int], design: RepairDesign, result: GenerationResult) -> None:
    """Bring the state to `used`, a shorter prefix of what it covers, at the end of a request; counted in `result`.

    Never raises for a failing replay: the tokens are out and right, so the state is given up, and a warning says so.
    """
    window, covered = warm.window, len(used)
    if design == "reset" or window is None or not window.leads_to(used):
        warm.reset()
        result.repair = "reset"
        return
    try:
        warm.replay(window, covered)
    except Exception:
        _log.warning(
            "the repair of a conversation failed: its state is dropped, its next request is cold", exc_info=True
        )
        warm.reset()
        result.repair = "reset"
        return
    result.repair = "replayed"
    result.replayed_tokens += covered - window.before.length


def realign(warm: WarmState, used: Sequence[int], prompt: int, result: GenerationResult) -> None:
    """Bring the state to `used`, the first `prompt` of them a prompt, for a request that goes on; counted in `result`.

    Exact without trusting the block: the tokens are processed again, from the last checkpoint before them.
    """
    result.replayed_tokens += warm.refill(used, prompt)
    result.repair = "realigned"
