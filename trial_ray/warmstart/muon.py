"""Muon (Jordan et al., 2024): momentum whose update of a matrix is made orthogonal.

torch's own iterates in bfloat16, matrix after matrix. A CPU without bfloat16 units then takes ten times as long, and another
CPU arrives at other weights. Here matrices of one shape are iterated together, on a CPU in float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial: the published ones, under which singular values end between 0.7 and 1.2."""
ITERATIONS = 5
LEAST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """Steps by orthogonal matrices of the momentum's directions, as ``torch.optim.Muon`` without weight decay.

    Args:
        matrices: what is trained; parameters of two dimensions.
        lr: learning rate, of a matrix of ``R`` rows and ``C`` columns times ``sqrt(max(1, R / C))``.
        momentum: of Nesterov's kind.

    Raises:
        ValueError: a parameter is no matrix.
    """

    def __init__(self, matrices: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})
        for group in self.param_groups:
            if any(matrix.dim() != 2 for matrix in group["params"]):
                raise ValueError(
                    "Muon trains matrices alone; give parameters of other dimensions to another optimizer."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # torch's may return a loss
        """Do one update of the matrices that have a gradient."""
        if closure is not None:
            raise ValueError("Muon takes no closure.")
        for group in self.param_groups:
            by_shape: dict[tuple[Any, ...], list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    rows, columns = sorted(matrix.shape)
                    update = self._nesterov(matrix, matrix.grad, group["momentum"])
                    by_shape[rows, columns, matrix.device, matrix.dtype].append((matrix, update))
            for trained in by_shape.values():
                wide = torch.stack([update if _is_wide(update) else update.T for _, update in trained])
                for (matrix, _), step in zip(trained, orthogonalized(wide), strict=True):
                    rows, columns = matrix.shape
                    rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                    matrix.add_(step if _is_wide(matrix) else step.T, alpha=-rate)

    def _nesterov(self, matrix: torch.Tensor, gradient: torch.Tensor, momentum: float) -> torch.Tensor:
        """The direction ``[R, C]`` of the next update, before it is made orthogonal."""
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        average = state["momentum"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum)


def _is_wide(matrix: torch.Tensor) -> bool:
    return matrix.shape[0] <= matrix.shape[1]


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Bring all singular values near 1, by Newton-Schulz iterations: ``U Vᵀ`` of ``U S Vᵀ``, roughly.

    Args:
        matrices: ``[N, R, C]`` with ``R <= C``; iterated in float32 on a CPU, elsewhere in bfloat16.

    Returns:
        ``[N, R, C]``, of the same type.
    """
    a, b, c = COEFFICIENTS
    iterated = matrices.to(torch.float32 if matrices.device.type == "cpu" else torch.bfloat16)
    iterated = iterated / iterated.norm(dim=(1, 2), keepdim=True).clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = iterated @ iterated.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        iterated = torch.baddbmm(iterated, polynomial, iterated, beta=a)
    return iterated.to(matrices.dtype)
