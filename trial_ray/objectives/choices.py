"""Names of the objective's variants, shared by settings and functions; does not import torch."""

from __future__ import annotations

from typing import Literal, get_args

ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
IMPORTANCE_MODES: tuple[ImportanceMode, ...] = get_args(ImportanceMode)
RatioLevel = Literal["token", "sequence"]
RATIO_LEVELS: tuple[RatioLevel, ...] = get_args(RatioLevel)
SurrogateMean = Literal["tokens", "rows", "fixed_length"]
SURROGATE_MEANS: tuple[SurrogateMean, ...] = get_args(SurrogateMean)
