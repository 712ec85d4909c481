"""Aug (Eq. 3): from an ordinary prompt and an outcome view to the hindsight prompt, in token ids.

The evidence goes to the end of the user's message, before the tokens that open the response, so that both views share the
prompt up to there and the recorded response follows unchanged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trial_ray.hindsight.outcome_view import OutcomeView
from trial_ray.hindsight.untrusted import encode_untrusted

EVIDENCE_LEAD = "\n\nOutcome after the reply:\n"
CUT_MARK = " [cut] "


def encode_evidence(view: OutcomeView, tokenizer: Any, max_outcome_tokens: int = 512) -> NDArray[np.int32]:
    """Token ids of the post-action evidence, tokenised apart from the prompt.

    It starts on a new line. Tokenised apart, it leaves the ids of the ordinary prompt as they were sent, even where
    the text as a whole would merge tokens across the seam. Evidence over the limit loses part of its middle, and a
    mark says so; its end stays, because a terminal turn's verdict stands there. Special tokens spelled in the view
    stay ordinary text.

    Args:
        view: the turn's outcome view.
        tokenizer: the policy's ``transformers`` tokenizer.
        max_outcome_tokens: most ids in the result, lead and mark included.

    Returns:
        int32 ``[z]``, ``z <= max_outcome_tokens``.

    Raises:
        ValueError: the limit leaves no room for any evidence between lead and mark.
    """
    ids = encode_untrusted(tokenizer, EVIDENCE_LEAD + view.text)
    if len(ids) > max_outcome_tokens:
        mark = encode_untrusted(tokenizer, CUT_MARK)
        lead_length = len(encode_untrusted(tokenizer, EVIDENCE_LEAD))
        room = max_outcome_tokens - lead_length - len(mark)
        if room < 1:
            raise ValueError(
                f"max_outcome_tokens must be above {lead_length + len(mark)} to hold any evidence, "
                f"got {max_outcome_tokens}"
            )
        end_length = room // 4
        head_length = max_outcome_tokens - len(mark) - end_length
        ids = ids[:head_length] + mark + ids[len(ids) - end_length :]
    return np.asarray(ids, dtype=np.int32)


def augment(prompt_ids: ArrayLike, insert_at: int, evidence_ids: ArrayLike) -> NDArray[np.int32]:
    """P_k⁺ of Eq. 3: the ordinary prompt with the evidence inserted at the end of the user's message.

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
