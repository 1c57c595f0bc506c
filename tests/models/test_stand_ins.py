import pytest
import torch
from torch import nn

from hessquant.errors import CaptureError
from hessquant.models.stand_ins import record_calls

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


class Model(nn.Module):
    """Three blocks; what is made of the hidden states besides is for those who derive from it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, hidden):
        first, states = hidden, [hidden]
        for block in self.blocks:
            assert hidden.shape == first.shape
            hidden = block(hidden.to(first.dtype))
            states.append(hidden)
        return self.end(first, states)

    def end(self, first, states):
        return states[-1] + first


class EarlierStates(Model):
    def end(self, first, states):
        return torch.stack(states[1:]).mean(0)


class Written(Model):
    def end(self, first, states):
        states[2][..., 0] = 1
        return states[-1]


class Copied(Model):
    def end(self, first, states):
        first[:] = states[1]
        return states[-1]


def calls(model, **options):
    return record_calls(model, BLOCKS, [False] * 3, lambda: model(torch.ones(1, 2, 4)), **options)


@pytest.mark.parametrize("model", [EarlierStates(), Written(), Copied()])
def test_what_blocks_return_may_go_nowhere_else(model):
    assert len(calls(model)) == 3  # the end is not reached, where that happens
    with pytest.raises(CaptureError, match="what blocks return goes elsewhere than to the next block"):
        calls(model, to_the_end=True)


def test_the_first_hidden_state_and_the_last_may_be_used_and_any_looked_at():
    assert len(calls(Model(), to_the_end=True)) == 3


class Beside(Model):
    def forward(self, hidden):
        beside = hidden
        for block in self.blocks:
            beside = beside + hidden
            hidden = block(hidden)
        return hidden + beside


def test_a_use_between_the_blocks_is_seen():
    with pytest.raises(CaptureError, match="goes elsewhere"):
        calls(Beside(), to_the_end=True)
