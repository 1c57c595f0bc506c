"""The page that shows what became of every family."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import transformers
from tests.architectures.families import NOT_BUILT

if TYPE_CHECKING:
    from tests.architectures.cover import Row

_HEAD = """# Architectures

There is no code per model: what each weight is multiplied with is watched while the model runs. This table shows what
that gives over the model families of transformers {version}: a tiny model of each, with random weights, quantized to
4 bits in groups of 32 on random tokens. Made by `make coverage`; a row is good only if

- every matrix that the forward pass multiplies by is quantized, or listed with its reason,
- decoded matrices are near the source's, in the orientation that it stores them in,
- the loss on the calibration inputs is below round-to-nearest's,
- the checkpoint opens again, and its outputs are those of our decoder's weights in the original model.

"By block": blocks are run one by one, with one of them in memory. "As one": the whole model is in memory, for the
reason given. "Left" is the share of the weights' bytes in 16 bit, embeddings and head apart; tiny models have large
shares of norms and convolutions. "Loss" is relative to round-to-nearest's, "outputs" the distance from the original's
outputs relative to these; on random weights neither says anything about real models.
"""

_TABLE = """| family | run | matrices | of experts | left | loss | outputs |
|---|---|---|---|---|---|---|"""


def written(rows: Iterable["Row"]) -> str:
    """The page, as Markdown."""
    rows = list(rows)
    good = [row for row in rows if not row.fault]
    bad = [row for row in rows if row.fault]
    causal = [row for row in good if " (" not in row.family]
    parts = [
        _HEAD.format(version=transformers.__version__),
        f"{len(causal)} families of causal language models, and {len(good) - len(causal)} other models.\n",
        "\n".join([_TABLE, *map(_line, good)]) + "\n",
        "## Not quantized\n",
        "\n".join(["| family | why |", "|---|---|", *(f"| {row.family} | {_cell(row.fault)} |" for row in bad)]) + "\n",
        "## Not built\n",
        "\n".join(
            ["| family | why |", "|---|---|", *(f"| {name} | {_cell(why)} |" for name, why in NOT_BUILT.items())]
        ),
    ]
    return "\n".join(parts) + "\n"


def _line(row: "Row") -> str:
    how = f"as one: {_cell(row.whole)}" if row.whole else "by block"
    experts = str(row.experts) if row.experts else ""
    return f"| {row.family} | {how} | {row.targets} | {experts} | {row.left:.1%} | {row.ratio:.2f} | {row.logits:.2f} |"


def _cell(text: str) -> str:
    return text.splitlines()[0].replace("|", "\\|")
