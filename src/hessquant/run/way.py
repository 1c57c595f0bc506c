"""How calibration is taken through a segment: what of it is held at once, and how less is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hessquant.calibration.batches import Batch
from hessquant.config import Config
from hessquant.errors import DeviceMemoryError
from hessquant.place import Place
from hessquant.planning.size import choose_capture
from hessquant.ranks import ALONE, Ranks
from hessquant.records import Plan


@dataclass(frozen=True)
class Way:
    """One way of running all batches.

    Attributes:
        capture: Whether a segment is run once, with all batches suspended in it, or in several passes.
        batches: Inputs of the model that fall to this process, where it runs.
    """

    capture: Literal["once", "passes"]
    batches: Sequence[Batch]

    def holding_less(self, why: str) -> tuple["Way", str]:
        """The next way that takes less memory: several passes, then batches of half of the windows.

        Args:
            why: What happened, for the sentence.

        Returns:
            It, and a sentence for the report. Weights that were solved stay as they are: the sums of those to come may
            differ in their last digits, as they are added in another order.

        Raises:
            DeviceMemoryError: If each batch is of one window already.
        """
        largest = max((len(batch.windows) for batch in self.batches), default=1)
        if self.capture == "once":
            return Way("passes", self.batches), f"{why}: segments were run in passes from then on"
        if largest == 1:
            raise DeviceMemoryError(
                f"{why} with one window at a time and nothing else suspended; take shorter windows (--window-length), "
                "a device with more memory, or --device cpu: what is finished on this one is not used there"
            )
        halves = [half for batch in self.batches for half in batch.halves()]
        largest = max(len(batch.windows) for batch in halves)
        return Way("passes", halves), f"{why}: batches were of {largest} windows or fewer from then on"


def first_way(plan: Plan, batches: Sequence[Batch], config: Config, place: Place, ranks: Ranks = ALONE) -> Way:
    """The way that the plan counted on, with the batches that fall to this process, where the model runs.

    Args:
        plan: What is quantized.
        batches: Of all windows.
        config: Settings.
        place: Where the model runs.
        ranks: The processes that share them. Where there are fewer batches than processes, they are halved.
    """
    while len(batches) < ranks.count and any(len(batch.windows) > 1 for batch in batches):
        batches = [half for batch in batches for half in batch.halves()]
    shares = [batches[ranks.part_of(len(batches), rank)] for rank in range(ranks.count)]
    tokens = max(sum(batch.tokens for batch in share) for share in shares)
    inside = [target for target in plan.targets if target.block < len(plan.blocks)]
    capture = choose_capture(plan.hidden_size, inside, tokens, config, place)
    return Way(capture, [batch.at(place) for batch in ranks.share(batches)])
