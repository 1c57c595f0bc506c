"""What rounding a weight costs at the end of the model, foretold: its error, seen by the model's own curvature.

To second order, a change D of a weight moves the model's predictions by KL = 1/2 vec(D)^T F vec(D), where F is the
Fisher matrix: the mean of g g^T, g being the gradient of -log p(labels) with labels drawn from the model itself
(Martens, arXiv 1412.1193). Of F no more is kept than the sums over rows and over columns of its diagonal, from which
the diagonal is made as Adafactor does (Shazeer and Stern, arXiv 1804.04235): F_ij = r_i c_j / sum(r). Inputs and what
follows are taken for independent, as in K-FAC (arXiv 1503.05671): c_j is an input's energy H_jj times how much is made
of it, and that factor, c_j / H_jj, weights what the sweep leaves of the error in column j, M_jj^2 e_j^2 (`core.gptq`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hessquant.core.factor import Factor
from hessquant.core.grid import QuantizedWeight


@dataclass
class Curvature:
    """Sums of a weight's squared gradients, each of the log-likelihood of a window's labels.

    Attributes:
        rows: Over its columns, float64 [rows].
        columns: Over its rows, float64 [columns].
        tokens: Tokens of all windows.
    """

    rows: Tensor
    columns: Tensor
    tokens: int = 0

    @classmethod
    def of_shape(cls, rows: int, columns: int, device: torch.device) -> "Curvature":
        """That of a weight of which no gradient is known yet."""
        zeros = torch.zeros(rows + columns, dtype=torch.float64, device=device)
        return cls(zeros[:rows], zeros[rows:])

    def add(self, gradient: Tensor, tokens: int) -> None:
        """Add the gradient [rows, columns] of one window of so many tokens."""
        squares = gradient.float().square()
        self.rows += squares.sum(1)
        self.columns += squares.sum(0)
        self.tokens += tokens


def predicted_divergence(
    weight: Tensor, rounded: QuantizedWeight, factor: Factor, energies: Tensor, curvature: Curvature
) -> float:
    """KL divergence of the model's predictions, in nats per token, that a weight on a grid is expected to cost.

    The weight is rounded to nearest; the sweep's own roundings differ, but have errors of the same size against targets
    of its own, and so cost M_jj^2 e_j^2 (arXiv 2210.17323), as do roundings beyond the grid's ends.

    Args:
        weight: [rows, columns], float32.
        rounded: The weight, rounded to nearest on the grid.
        factor: Of its damped Hessian.
        energies: Diagonal of the Hessian, undamped, [columns]; an input without energy costs nothing.
        curvature: Its sums, of one window or more.
    """
    total = curvature.rows.sum()
    if not total > 0:
        return 0.0
    energies = energies.double()
    made_of = torch.where(energies > 0, curvature.columns / energies, 0.0)
    errors = (weight - rounded.dequantize(weight.dtype)).square_()
    per_row = errors @ (made_of * factor.importance).to(errors.dtype)
    return float(curvature.rows @ per_row.double() / total) / (2 * curvature.tokens)
