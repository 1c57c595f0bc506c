"""CASES A3: stacked experts, stored either way, against the same experts as plain layers."""

import pytest
import torch
from torch import nn

from hessquant.calibration.batches import Batch
from hessquant.capture import segments
from hessquant.capture.collect import Collector
from hessquant.capture.once import run_once
from hessquant.capture.passes import run_in_passes
from hessquant.capture.prelude import BatchState
from hessquant.capture.stops import InputGroup, Stop
from hessquant.core.hessian import hessian
from hessquant.errors import CaptureError
from hessquant.models.stand_ins import BlockArguments
from hessquant.models.watch import Product

RUNS = pytest.mark.parametrize("run_segment", [run_once, run_in_passes])
HIDDEN, INNER, EXPERTS, CHOSEN = 64, 32, 4, 2


class StackedExperts(nn.Module):
    """[experts, rows, columns], or [experts, columns, rows] where it is transposed; 2 * 32 = 64, square on purpose."""

    def __init__(self, transposed):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator) / 8
        down = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) / 6
        self.transposed = transposed
        self.gate_up_proj = nn.Parameter(gate_up.transpose(1, 2).contiguous() if transposed else gate_up)
        self.down_proj = nn.Parameter(down.transpose(1, 2).contiguous() if transposed else down)

    def product(self, inputs, stack, expert):
        return inputs @ stack[expert] if self.transposed else nn.functional.linear(inputs, stack[expert])

    def forward(self, hidden, chosen, weights):
        output = torch.zeros_like(hidden)
        for expert in range(EXPERTS):
            token, rank = torch.where(chosen == expert)
            if not len(token):
                continue
            gate, up = self.product(hidden[token], self.gate_up_proj, expert).chunk(2, dim=-1)
            inner = nn.functional.silu(gate) * up
            output.index_add_(0, token, self.product(inner, self.down_proj, expert) * weights[token, rank, None])
        return output


class Block(nn.Module):
    def __init__(self, transposed=False):
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        nn.init.normal_(self.router.weight, generator=torch.Generator().manual_seed(1))
        self.experts = StackedExperts(transposed)
        self.last = nn.Linear(HIDDEN, HIDDEN, bias=False)
        nn.init.normal_(self.last.weight, generator=torch.Generator().manual_seed(2))

    def route(self, flat):
        weights, chosen = self.router(flat).softmax(-1).topk(CHOSEN, dim=-1)
        return chosen, weights

    def forward(self, hidden):
        flat = hidden.flatten(0, 1)
        return self.last((flat + self.experts(flat, *self.route(flat))).view_as(hidden))


def expert_stop():
    groups = [
        InputGroup((f"{part}.{expert}",), ((f"experts.{part}", expert),))
        for part in ("gate_up_proj", "down_proj")
        for expert in range(EXPERTS)
    ]
    return Stop(tuple(groups), module="experts")


LAST = Stop((InputGroup(("last.weight",), (("last.weight", 0),)),))


def batches(count=5, length=12):
    generator = torch.Generator().manual_seed(3)
    nothing = (BlockArguments((), {}, False),)
    return [
        BatchState(
            Batch({"input_ids": torch.zeros(1, 1)}, (2 * n, 2 * n + 1)),
            torch.randn(2, length, HIDDEN, generator=generator),
            nothing,
        )
        for n in range(count)
    ]


class Halving:
    """Stands in for the solver: notes the statistics and halves all weights of the stop."""

    def __init__(self, parameters):
        self.parameters, self.hessians, self.tokens = parameters, {}, {}

    def __call__(self, stop, statistics):
        self.hessians |= {leader: hessian(found) for leader, found in statistics.items()}
        self.tokens |= {leader: found.token_count for leader, found in statistics.items()}
        for name in {key[0] for group in stop.groups for key in group.keys}:
            self.parameters[name].mul_(0.5)


def run(run_segment, block, states, **settings):
    block.requires_grad_(False)
    solver = Halving(dict(block.named_parameters()))
    collector = Collector((expert_stop(), LAST), solver.parameters, **settings)
    with collector.noting_calls(block, ""):
        run_segment(segments.Block(0, "", block, (), ()), states, collector, solver)
    return solver


def routed_inputs(block, states):
    """Inputs of every expert's layers, each a plain nn.Linear seen by a hook on it."""
    seen = {}
    flat = torch.cat([state.hidden.flatten(0, 1) for state in states])
    chosen, _ = block.route(flat)
    for expert in range(EXPERTS):
        inputs = flat[(chosen == expert).any(dim=1)]
        layers = {}
        for part in ("gate_up_proj", "down_proj"):
            weight = getattr(block.experts, part)[expert]
            weight = weight.T if block.experts.transposed else weight
            layers[part] = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            layers[part].weight.data.copy_(weight)
            layers[part].register_forward_pre_hook(
                lambda _, args, key=f"{part}.{expert}": seen.__setitem__(key, args[0].double())
            )
        gate, up = layers["gate_up_proj"](inputs).chunk(2, dim=-1)
        layers["down_proj"](nn.functional.silu(gate) * up)
    return seen


@RUNS
@pytest.mark.parametrize("transposed", [False, True])
def test_each_expert_sees_the_tokens_routed_to_it_on_its_input_axis(run_segment, transposed):
    block, states = Block(transposed), batches()
    with torch.no_grad():
        expected = routed_inputs(block, states)
    solver = run(run_segment, block, states)
    for key, inputs in expected.items():
        assert solver.tokens[key] == len(inputs)
        torch.testing.assert_close(solver.hessians[key].double(), inputs.T @ inputs / len(inputs), rtol=1e-4, atol=1e-6)
    per_stack = [sum(solver.tokens[f"{part}.{e}"] for e in range(EXPERTS)) for part in ("gate_up_proj", "down_proj")]
    assert per_stack == [5 * 2 * 12 * CHOSEN] * 2


def test_both_layouts_and_both_ways_of_running_give_one_result():
    first, first_states = run(run_once, Block(), batches()), batches()
    for run_segment in (run_once, run_in_passes):
        for transposed in (False, True):
            states = batches()
            solver = run(run_segment, Block(transposed), states)
            for key, found in first.hessians.items():
                torch.testing.assert_close(solver.hessians[key], found, rtol=1e-5, atol=1e-6)
    assert len(first_states) == 5


@RUNS
def test_what_comes_after_the_experts_sees_the_quantized_ones(run_segment):
    block, states = Block(), batches()
    before = torch.cat([state.hidden.flatten(0, 1) for state in states])
    solver = run(run_segment, block, states)
    with torch.no_grad():
        # The solver halved the experts; the router is as it was.
        inputs = (before + block.experts(before, *block.route(before))).double()
    expected = inputs.T @ inputs / len(inputs)
    torch.testing.assert_close(solver.hessians["last.weight"].double(), expected, rtol=1e-4, atol=1e-5)


@RUNS
def test_all_experts_can_be_fitted_to_all_tokens_while_outputs_stay_routed(run_segment):
    routed, states = batches(), batches()
    run(run_segment, Block(), routed)
    solver = run(run_segment, Block(), states, every_expert=True)
    assert set(solver.tokens.values()) == {5 * 2 * 12}
    first = solver.hessians["gate_up_proj.0"]
    assert all(torch.equal(solver.hessians[f"gate_up_proj.{e}"], first) for e in range(EXPERTS))
    for one, other in zip(routed, states, strict=True):
        assert torch.equal(one.hidden, other.hidden)


def test_experts_that_choose_their_tokens_themselves_cannot_see_all():
    class SelfRouted(StackedExperts):
        def forward(self, hidden):
            return super().forward(hidden, *self.owner[0].route(hidden))

    block = Block()
    block.experts.__class__ = SelfRouted
    block.experts.owner = [block]
    block.forward = lambda hidden: block.last(block.experts(hidden.flatten(0, 1)).view_as(hidden))
    with pytest.raises(CaptureError, match="experts chooses its experts itself"):
        run(run_once, block, batches(), every_expert=True)


@RUNS
def test_an_expert_that_no_token_reaches_has_no_statistics(run_segment):
    block = Block()
    block.route = lambda flat: (torch.zeros(len(flat), 1, dtype=torch.long), torch.ones(len(flat), 1))
    solver = run(run_segment, block, batches())
    assert set(solver.tokens) == {"gate_up_proj.0", "down_proj.0", "last.weight"}


def test_where_all_experts_are_multiplied_at_once_rows_of_zeros_are_no_tokens():
    stack = torch.randn(2, 8, 4)
    groups = tuple(InputGroup((f"w.{e}",), (("w", e),)) for e in range(2))
    collector = Collector((Stop(groups, module="experts"),), {})
    inputs = torch.ones(2, 5, 8)
    inputs[0, 2:] = 0
    product = Product("w", inputs, inputs, 4, 8, True, len(stack), None)
    collector.add(product, BatchState(Batch({"input_ids": torch.zeros(1, 1)}, (0,)), torch.zeros(1, 5, 8), ()))
    found = collector.take(collector.stops[0])
    assert {leader: statistics.token_count for leader, statistics in found.items()} == {"w.0": 2, "w.1": 5}
