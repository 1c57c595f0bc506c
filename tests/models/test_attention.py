import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend

from hessquant.models.flow import FeedsAttention

ALL = torch.ones(4, 4, dtype=torch.bool)
CAUSAL = ALL.tril()
SLIDING = CAUSAL.triu(-1)


def added(seen, never):
    return torch.zeros(seen.shape).masked_fill(~seen, never)


def is_causal(keys=4, *mask, **named):
    """Whether attention of 4 queries is taken for causal within one sequence."""
    feeds, queries, keys = FeedsAttention(), torch.randn(1, 2, 4, 8), torch.randn(1, 2, keys, 8)
    feeds.enter()
    feeds.multiply("weight")
    with feeds:
        output = attend(queries, keys, keys, *mask, **named)
    assert torch.equal(output, attend(queries, keys, keys, *mask, **named))
    return feeds.names == {"weight"}


@pytest.mark.parametrize("seen", [CAUSAL, SLIDING, CAUSAL[None, None].expand(1, 2, 4, 4)])
def test_a_mask_that_hides_every_later_key_is_causal(seen):
    assert is_causal(attn_mask=seen)
    assert is_causal(attn_mask=added(seen, -torch.inf))
    assert is_causal(attn_mask=added(seen, torch.finfo(torch.float32).min))


@pytest.mark.parametrize("seen", [ALL, ALL.tril().triu(-1) | ALL.triu().tril(1)], ids=["all", "neighbours"])
def test_a_mask_that_shows_a_later_key_is_not(seen):
    assert not is_causal(attn_mask=seen)
    assert not is_causal(attn_mask=added(seen, -torch.inf))


def test_without_a_mask_the_call_says_it():
    assert not is_causal()
    assert not is_causal(is_causal=False)
    assert is_causal(is_causal=True)


def test_arguments_may_come_by_position():
    assert is_causal(4, CAUSAL)
    assert is_causal(4, None, 0.0, True)
    assert not is_causal(4, ALL)


def test_keys_of_another_sequence_are_not_told_apart_by_a_triangle():
    assert not is_causal(6, torch.ones(4, 6, dtype=torch.bool).tril())


def test_a_module_without_weights_attends_for_its_parent():
    feeds = FeedsAttention()
    heads = torch.randn(1, 2, 4, 8)
    with feeds:
        feeds.enter()
        feeds.multiply("before")
        feeds.enter()
        feeds.multiply("qkv")
        feeds.enter()
        attend(heads, heads, heads, is_causal=True)
        feeds.leave()
        feeds.multiply("output")
        feeds.leave()
        feeds.multiply("mlp")
    assert feeds.names == {"qkv"}


def test_attention_without_any_weight_names_none():
    feeds = FeedsAttention()
    with feeds:
        feeds.enter()
        nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8), is_causal=True)
    assert not feeds.names
