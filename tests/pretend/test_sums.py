"""Sums of products of 16-bit inputs where the device adds them up in float32, and what makes the host wait for them."""

import pytest
import torch
from tests.problems import correlated_inputs
from tests.watched import LiveBytes
from torch.overrides import TorchFunctionMode

from hessquant.core import gram
from hessquant.core.gram import WeightedTokens
from hessquant.core.hessian import HessianAccumulator, hessian
from hessquant.errors import NonFiniteError
from hessquant.place import multiplies_into_float32

HALVES = [torch.bfloat16, torch.float16]

# Of float32 sums of so many products, against the same in float64; an input that was rounded to 16 bits twice, or a
# weighted one once, would be off by 1e-3.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


class Products(TorchFunctionMode):
    """While entered, notes of which dtypes matrices are multiplied, and to which."""

    def __init__(self):
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.mm, torch.addmm, torch.Tensor.addmm_):
            self.seen.append((args[-1].dtype, result.dtype))
        return result


@pytest.fixture
def asked_anew():
    multiplies_into_float32.cache_clear()
    yield
    multiplies_into_float32.cache_clear()


pytestmark = pytest.mark.usefixtures("asked_anew")


def summed(inputs, weighted=None, parts=3):
    accumulator = HessianAccumulator()
    for part in inputs.split(len(inputs) // parts):
        accumulator.add(part, weighted)
    return accumulator.take()


def exact(inputs, weighted=None, parts=3):
    """[columns, columns], float64."""
    each = len(inputs) // parts
    weights = torch.ones(each) if weighted is None else weighted.values(each)
    wide = inputs.double()
    return wide.T @ (wide * weights.double().repeat(parts)[:, None]) / (weights.double().sum() * parts)


WEIGHTED = {
    "all alike": None,
    "first tokens": WeightedTokens(slice(None, None, 10), 10.0),
    "an odd weight": WeightedTokens(slice(3, None, 7), 1237.3),
    "none": WeightedTokens(slice(1, 4), 0.0),
    "of one token": WeightedTokens(slice(None, None, 1), 1.0),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", WEIGHTED)
def test_products_of_16_bits_are_summed_in_float32(name, dtype, accelerator, monkeypatch):
    monkeypatch.setattr(gram, "_PANEL", 48)
    inputs, weighted = correlated_inputs(120, 100, 0).to(dtype), WEIGHTED[name]
    there = inputs.to(accelerator.device)
    assert multiplies_into_float32(accelerator.device, dtype)
    with Products() as products:
        found = summed(there, weighted)
    assert found.sum.dtype == torch.float32
    assert found.token_count == 120
    assert [pair for pair in products.seen if pair[0] == dtype] == [(dtype, torch.float32)] * 3 * 3
    torch.testing.assert_close(hessian(found).cpu().double(), exact(inputs, weighted), **TOLERANCE)


def test_the_largest_numbers_of_float16_fit(accelerator):
    inputs = torch.full((8, 3), 65504.0, dtype=torch.float16)
    found = hessian(summed(inputs.to(accelerator.device), WeightedTokens(slice(None, None, 2), 2.0), parts=2))
    torch.testing.assert_close(found.cpu().double(), torch.full((3, 3), 65504.0**2).double())


def test_without_such_a_product_they_are_taken_to_float32_first(accelerator, monkeypatch):
    inputs, weighted = correlated_inputs(60, 100, 1).bfloat16(), WEIGHTED["first tokens"]
    original = torch.mm

    def refuse(*args, out_dtype=None, **kwargs):
        if out_dtype is not None:
            raise NotImplementedError("mm.dtype")
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", refuse)
    assert not multiplies_into_float32(accelerator.device, torch.bfloat16)
    assert torch.equal(
        hessian(summed(inputs.to(accelerator.device), weighted)).cpu(), hessian(summed(inputs, weighted))
    )


@pytest.mark.parametrize("wrong", [lambda product: product.bfloat16().float(), lambda product: product * 0])
def test_one_that_rounds_is_not_used(wrong, accelerator, monkeypatch):
    original = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: wrong(original(*args, **kwargs)))
    assert not multiplies_into_float32(accelerator.device, torch.bfloat16)


def test_want_of_memory_is_not_taken_for_want_of_the_product(accelerator):
    with accelerator.room_for(0), pytest.raises(torch.OutOfMemoryError):
        multiplies_into_float32(accelerator.device, torch.bfloat16)
    assert multiplies_into_float32(accelerator.device, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_inputs_are_summed_as_on_the_cpu(dtype, accelerator):
    inputs = correlated_inputs(60, 300, 2, dtype)
    assert torch.equal(hessian(summed(inputs.to(accelerator.device))).cpu(), hessian(summed(inputs)))


def test_the_cpu_takes_16_bits_to_float32():
    inputs = correlated_inputs(60, 300, 3).bfloat16()
    assert torch.equal(hessian(summed(inputs)), hessian(summed(inputs.float())))


def test_no_second_sum_and_no_float32_copy_of_the_inputs_is_made(accelerator, monkeypatch):
    monkeypatch.setattr(gram, "_PANEL", 16)
    columns = 256
    inputs = torch.ones(columns, columns, dtype=torch.bfloat16, device=accelerator.device)
    accumulator = HessianAccumulator()
    accumulator.add(inputs)
    with LiveBytes() as live:
        accumulator.add(inputs)
    assert live.peak < 4 * columns**2 // 2


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_nothing_waits_until_the_statistics_are_taken(dtype, accelerator):
    inputs = torch.ones(40, 8, dtype=dtype, device=accelerator.device)
    multiplies_into_float32(accelerator.device, dtype)
    for batches in (1, 5):
        accelerator.waits.clear()
        accumulator = HessianAccumulator()
        for _ in range(batches):
            accumulator.add(inputs, WEIGHTED["first tokens"])
        assert not accelerator.waits
        accumulator.take()
        assert accelerator.waited() == 1


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_first_that_is_not_finite_is_named_when_they_are_taken(bad, dtype, accelerator):
    accumulator = HessianAccumulator()
    largest = torch.finfo(dtype).max  # whose sum is not finite, and which is
    for batch in range(4):
        inputs = torch.full((6, 5), largest, dtype=dtype)
        if batch in (1, 2):
            inputs[4 - batch, 2:4] = bad
            inputs[5, 0] = -bad
        accumulator.add(inputs.to(accelerator.device))
    with pytest.raises(NonFiniteError, match=f"token 9, channel 2 is {bad}") as caught:
        accumulator.take()
    assert caught.value.place == (9, 2)
    assert accumulator.take() is None


def test_large_finite_inputs_there_are_not_taken_for_infinite_ones(accelerator):
    accumulator = HessianAccumulator()
    accumulator.add(torch.full((4, 2), 3e38, device=accelerator.device))
    accumulator.add(torch.ones(0, 2, device=accelerator.device))
    assert accumulator.take().token_count == 4
