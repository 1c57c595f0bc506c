import pytest
import torch

from hessquant.models.flow import Flow

TOKENS, WIDTH = 6, 4


def product(flow, name, inputs, rows):
    """A product with a weight, announced as whoever watches products does it."""
    weight = torch.randn(rows, inputs.shape[-1])
    flow.multiply(name, rows)
    return torch.nn.functional.linear(inputs, weight)


@pytest.fixture
def flow():
    return Flow()


def scores(flow):
    """Scores of positions against each other, by two weights."""
    inputs = torch.randn(TOKENS, WIDTH)
    query, key = product(flow, "query", inputs, 8), product(flow, "key", inputs, 8)
    return query, torch.matmul(query.relu(), key.T)


def test_what_ends_in_a_choice_alone_is_an_indexer(flow):
    with flow:
        _, found = scores(flow)
        chosen = found.topk(2).indices
        product(flow, "value", torch.randn(TOKENS, WIDTH)[chosen[0]], 8)
    assert flow.choosers == {"query": "indexer", "key": "indexer"}


def test_what_goes_on_into_another_product_does_more_than_choose(flow):
    with flow:
        query, found = scores(flow)
        found.topk(2)
        product(flow, "next", query * 2, 8)
    assert flow.choosers == {"key": "indexer"}


def test_values_that_are_chosen_go_on_and_their_positions_do_not(flow):
    with flow:
        _, found = scores(flow)
        product(flow, "next", found.topk(WIDTH).values, 8)
    assert flow.choosers == {}


def test_what_is_written_into_a_tensor_goes_on_with_it(flow):
    with flow:
        _, found = scores(flow)
        found.topk(2)
        kept = torch.zeros(TOKENS, TOKENS)
        kept.add_(found)
        product(flow, "next", kept, 8)
    assert flow.choosers == {}


def test_a_router_has_as_many_outputs_as_there_are_candidates(flow):
    with flow:
        weights = product(flow, "router", torch.randn(TOKENS, WIDTH), 8).softmax(-1).topk(2).values
        product(flow, "expert", torch.randn(TOKENS, WIDTH) * weights[:, :1], 8)
    assert flow.choosers == {"router": "router"}


def test_a_weight_of_as_many_outputs_that_was_not_chosen_from_is_no_router(flow):
    with flow:
        _, found = scores(flow)
        product(flow, "other", torch.randn(TOKENS, WIDTH), TOKENS)
        found.topk(2)
    assert "other" not in flow.choosers


@pytest.mark.parametrize(
    ("divide", "expected"),
    [
        (lambda both: both.chunk(2, dim=-1), "first and second"),
        (lambda both: torch.chunk(both, 2, -1), "first and second"),
        (lambda both: both.split(4, dim=-1), "first and second"),
        (lambda both: torch.split(both, [4, 4], dim=-1), "first and second"),
        (lambda both: (both[..., ::2], both[..., 1::2]), "in turn"),
        (lambda both: both.chunk(2, dim=0), None),
        (lambda both: both.split(2, dim=-1), None),
        (lambda both: both[..., :4], None),
    ],
)
def test_how_outputs_are_divided_in_two_is_seen(flow, divide, expected):
    with flow:
        divide(product(flow, "both", torch.randn(TOKENS, WIDTH), 8) + 1)
    assert flow.halves.get("both") == expected
