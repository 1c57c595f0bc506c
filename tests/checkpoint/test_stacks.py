"""Matrices of experts that a checkpoint has apart, put together as the model stores them."""

import pytest
import torch

from hessquant.checkpoint.stacks import restacked
from hessquant.models.products import ProbedProduct
from hessquant.records import Location

EXPERTS, ROWS, COLUMNS = 3, 4, 6


def product(expert, name, part_rows, transposed):
    location = Location("experts.both", ROWS, piece=expert, transposed=transposed, stacked=True)
    return ProbedProduct(
        f"experts.{expert}.{name}.weight",
        (location,),
        ROWS,
        transposed,
        columns=COLUMNS,
        multiplied_whole=True,
        input_id=(0, 0),
        part_of="experts.both",
        part_rows=part_rows,
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("parts", [{"one": (0, 1)}, {"gate": (0, 1), "up": (ROWS, 1)}, {"gate": (0, 2), "up": (1, 2)}])
def test_a_stack_that_was_taken_apart_is_the_same_again(parts, transposed):
    rows = ROWS * len(parts)
    upright = torch.randn(EXPERTS, rows, COLUMNS)
    stack = upright.transpose(1, 2).contiguous() if transposed else upright
    products, state = [], {"norm": torch.ones(2)}
    for expert in reversed(range(EXPERTS)):  # pieces are told apart by their numbers, not by their order
        for name, (first, step) in parts.items():
            products.append(product(expert, name, (first, step), transposed))
            own = upright[expert][first::step][:ROWS]
            state[products[-1].name] = own.T.contiguous() if transposed else own
    together = restacked(state, products, lambda each: each.joined(state.__getitem__))
    assert together.keys() == {"norm", "experts.both"}
    assert torch.equal(together["experts.both"], stack)
    assert restacked(state, products, lambda each: each.shape)["experts.both"] == stack.shape


def test_a_stack_of_which_a_matrix_is_missing_stays_apart():
    products = [product(expert, "one", (0, 1), False) for expert in range(EXPERTS)]
    state = {each.name: torch.zeros(ROWS, COLUMNS) for each in products[1:]}
    assert restacked(state, products, lambda each: each.joined(state.__getitem__)) == state
