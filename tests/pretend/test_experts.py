"""What experts make the host wait for while their inputs are collected: not more, the more they are."""

import pytest
import torch
from tests.problems import correlated_inputs

from hessquant.calibration.batches import Batch
from hessquant.capture.collect import Collector
from hessquant.capture.stops import InputGroup, Stop
from hessquant.errors import NonFiniteError
from hessquant.models.watch import Product

COLUMNS, TOKENS = 12, 20


def routed_to(experts, device):
    """Inputs [experts, tokens, columns] where each expert sees some of the tokens, and the last none."""
    tokens = correlated_inputs(TOKENS, COLUMNS, 0).float()
    inputs = torch.zeros(experts, TOKENS, COLUMNS)
    for expert in range(experts - 1):
        inputs[expert, expert % 3 :: 3] = tokens[expert % 3 :: 3]
    return inputs.to(device)


def collected(experts, device, clear=lambda: None, poison=None):
    groups = [InputGroup((f"e{n}",), (("m.w", n),)) for n in range(experts)]
    stop = Stop(tuple(groups), module="m")
    parameters = {"m.w": torch.zeros(experts, 4, COLUMNS, device=device)}
    collector = Collector((stop,), parameters)
    inputs = routed_to(experts, device)
    if poison is not None:
        inputs[poison] = torch.nan
    clear()
    batch = Batch({"input_ids": torch.zeros(1, TOKENS)}, (0,))
    for _ in range(2):
        collector.add(Product("m.w", inputs, inputs, 4, COLUMNS, False, experts, None), batch)
    return collector.take(stop)


def test_all_experts_at_once_are_summed_there_as_here(accelerator):
    there, here = (collected(5, device) for device in (accelerator.device, torch.device("cpu")))
    assert [seen.token_count for seen in there.values()] == [14, 14, 12, 14, 0]
    for name, seen in here.items():
        assert there[name].token_count == seen.token_count
        assert there[name].sum.device == accelerator.device
        assert torch.equal(there[name].sum.cpu().tril(), seen.sum.tril())


def test_more_of_them_do_not_make_the_host_wait_more(accelerator):
    waits = []
    for experts in (3, 9):
        collected(experts, accelerator.device, accelerator.waits.clear)
        waits.append(accelerator.waited())
    # Twice per batch, and once at the end.
    assert waits == [5, 5]


def test_the_expert_with_a_bad_input_is_still_named(accelerator):
    for device in (accelerator.device, torch.device("cpu")):
        with pytest.raises(NonFiniteError, match=r"^e3: the input is nan in calibration .*, channel 7"):
            collected(5, device, poison=(3, 3, 7))
