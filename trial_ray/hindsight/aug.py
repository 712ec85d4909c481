"""Aug (Eq. 3): from an ordinary prompt and a privileged view to the hindsight prompt, in token ids.

An outcome goes to the end of the user's message, before the tokens that open the response, so that both views share the
prompt up to there; the recorded response follows unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trial_ray.errors import ConfigError
from trial_ray.hindsight.outcome_view import Frame, PrivilegedView
from trial_ray.hindsight.untrusted import encode_untrusted

CUT_MARK = " [cut] "


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the second view of a turn inserts into its prompt.

    Attributes:
        ids: int32 ``[z]``.
        insert_at: index in the prompt before which they go.
    """

    ids: NDArray[np.int32]
    insert_at: int


def encode_evidence(view: PrivilegedView, tokenizer: Any, max_outcome_tokens: int = 512) -> NDArray[np.int32]:
    """Token ids of what a view shows, lead and close included, tokenised apart from the prompt.

    Tokenised apart, it leaves the ids of the ordinary prompt as they were sent, even where the text as a whole would merge
    tokens across the seam. Over the limit, the text loses part of its middle, and a mark says so; its end stays, because a
    terminal turn's verdict stands there. Special tokens spelled in the view stay ordinary text.

    Args:
        view: of the turn.
        tokenizer: the policy's ``transformers`` tokenizer.
        max_outcome_tokens: most ids in the result, lead, close and mark included.

    Returns:
        int32 ``[z]``, ``z <= max_outcome_tokens``.

    Raises:
        ConfigError: see :func:`require_room`.
    """
    close = encode_untrusted(tokenizer, view.frame.close)
    ids, limit = encode_untrusted(tokenizer, view.frame.lead + view.text), max_outcome_tokens - len(close)
    if len(ids) > limit:
        mark = encode_untrusted(tokenizer, CUT_MARK)
        end_length = require_room(view.frame, tokenizer, max_outcome_tokens) // 4
        ids = ids[: limit - len(mark) - end_length] + mark + ids[len(ids) - end_length :]
    return np.asarray(ids + close, dtype=np.int32)


def require_room(frame: Frame, tokenizer: Any, max_outcome_tokens: int) -> int:
    """Most tokens of a text that is cut to fit into a frame, at least one.

    Args:
        frame: of the view.
        tokenizer: the policy's.
        max_outcome_tokens: as in :func:`encode_evidence`.

    Raises:
        ConfigError: the limit leaves no room for any of the text.
    """
    least = sum(len(encode_untrusted(tokenizer, text)) for text in (frame.lead, CUT_MARK, frame.close))
    if max_outcome_tokens <= least:
        raise ConfigError(
            f"max_outcome_tokens is {max_outcome_tokens}, expected more than {least}: what stands around the privileged text, "
            f"from {frame.lead.strip()!r} on, and the mark of a cut have so many. Raise it."
        )
    return max_outcome_tokens - least


def augment(prompt_ids: ArrayLike, insert_at: int, evidence_ids: ArrayLike) -> NDArray[np.int32]:
    """P_k⁺ of Eq. 3: the ordinary prompt with the evidence inserted.

    Args:
        prompt_ids: integer ``[P]``, the ordinary prompt P_k.
        insert_at: index in ``prompt_ids`` before which the evidence goes, in ``[0, P]``.
        evidence_ids: integer ``[z]``.

    Returns:
        int32 ``[P + z]``.

    Raises:
        ValueError: ids that are not one-dimensional integers, or ``insert_at`` outside of the prompt.
    """
    prompt = _ids(prompt_ids, "prompt_ids")
    evidence = _ids(evidence_ids, "evidence_ids")
    if not 0 <= insert_at <= len(prompt):
        raise ValueError(f"insert_at must be in [0, {len(prompt)}] for a prompt of that length, got {insert_at}")
    return np.concatenate([prompt[:insert_at], evidence, prompt[insert_at:]])


def _ids(values: ArrayLike, name: str) -> NDArray[np.int32]:
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int32)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must be one-dimensional integer ids, got shape {array.shape} of {array.dtype}")
    return array.astype(np.int32, copy=False)
