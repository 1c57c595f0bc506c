import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend

from hessquant.models.attention import AttentionWatch, FeedsAttention

ALL = torch.ones(4, 4, dtype=torch.bool)
CAUSAL = ALL.tril()
SLIDING = CAUSAL.triu(-1)


def added(seen, never):
    return torch.zeros(seen.shape).masked_fill(~seen, never)


def count(**mask):
    calls, heads = [], torch.randn(1, 2, 4, 8)
    with AttentionWatch(lambda: calls.append(1)):
        output = attend(heads, heads, heads, **mask)
    assert torch.equal(output, attend(heads, heads, heads, **mask))
    return len(calls)


@pytest.mark.parametrize("seen", [CAUSAL, SLIDING, CAUSAL[None, None].expand(1, 2, 4, 4)])
def test_a_mask_that_hides_every_later_key_is_causal(seen):
    assert count(attn_mask=seen) == 1
    assert count(attn_mask=added(seen, -torch.inf)) == 1
    assert count(attn_mask=added(seen, torch.finfo(torch.float32).min)) == 1


@pytest.mark.parametrize("seen", [ALL, ALL.tril().triu(-1) | ALL.triu().tril(1)], ids=["all", "neighbours"])
def test_a_mask_that_shows_a_later_key_is_not(seen):
    assert count(attn_mask=seen) == 0
    assert count(attn_mask=added(seen, -torch.inf)) == 0


def test_without_a_mask_the_call_says_it():
    assert count() == 0
    assert count(is_causal=False) == 0
    assert count(is_causal=True) == 1


def test_arguments_may_come_by_position():
    calls, heads = [], torch.randn(1, 2, 4, 8)
    with AttentionWatch(lambda: calls.append(1)):
        attend(heads, heads, heads, CAUSAL)
        attend(heads, heads, heads, None, 0.0, True)
        attend(heads, heads, heads, ALL)
    assert len(calls) == 2


def test_keys_of_another_sequence_are_not_told_apart_by_a_triangle():
    queries, keys, calls = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8), []
    with AttentionWatch(lambda: calls.append(1)):
        attend(queries, keys, keys, torch.ones(4, 6, dtype=torch.bool).tril())
    assert not calls


def test_a_module_without_weights_attends_for_its_parent():
    feeds = FeedsAttention()
    heads = torch.randn(1, 2, 4, 8)
    with feeds.watch:
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
    with feeds.watch:
        feeds.enter()
        nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8), is_causal=True)
    assert not feeds.names
