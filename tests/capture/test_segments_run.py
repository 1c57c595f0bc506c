"""Running blocks: forward once, early-stopping passes, and what they collect."""

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hessquant.calibration.batches import Batch, batches_of
from hessquant.capture.collect import Collector
from hessquant.capture.once import run_once
from hessquant.capture.passes import run_in_passes
from hessquant.capture.prelude import BatchState, BlockArguments, record_arguments
from hessquant.capture.segments import Block
from hessquant.capture.stops import InputGroup, Stop, stops_of
from hessquant.core.hessian import hessian
from hessquant.errors import CaptureError, NonFiniteError
from hessquant.models.watch import Product
from hessquant.records import GridSpec, Location, Target, TokenWindow

RUNS = pytest.mark.parametrize("run", [run_once, run_in_passes])
BLOCK = "model.layers.0"
LLAMA_STOPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        bos_token_id=1,
        eos_token_id=2,
    )
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def some_windows(lengths=(12,) * 6):
    generator = torch.Generator().manual_seed(1)
    return [TokenWindow(tuple(torch.randint(0, 97, (n,), generator=generator).tolist())) for n in lengths]


def states_of(model, windows, tokens_per_batch=24):
    return record_arguments(
        model, ["model.layers.0", "model.layers.1"], [False, False], batches_of(windows, tokens_per_batch)
    )


def stop_at(*names, weighted=False):
    return Stop((InputGroup(names, tuple((name, 0) for name in names), weighted),))


def stops(block=BLOCK, weighted=True):
    """A Llama block's; where keys and values are made, tokens count as often as they are read."""
    named = [tuple(f"{block}.{name}.weight" for name in names) for names in LLAMA_STOPS]
    return tuple(stop_at(*names, weighted=weighted and names is named[0]) for names in named)


def segment(block):
    return Block(0, BLOCK, block, (), ())


class Halving:
    """Stands in for the solver: notes the Hessian and halves the weights, so that later inputs change."""

    def __init__(self, parameters):
        self.parameters, self.hessians, self.tokens = parameters, {}, {}

    def __call__(self, stop, statistics):
        for leader, seen in statistics.items():
            self.hessians[leader], self.tokens[leader] = hessian(seen), seen.token_count
        for name in (key[0] for group in stop.groups for key in group.keys):
            self.parameters[name].mul_(0.5)


def collect(run, model, windows, weighted=True):
    states = states_of(model, windows)
    solver = Halving(dict(model.named_parameters()))
    run(segment(model.get_submodule(BLOCK)), states, Collector(stops(weighted=weighted), solver.parameters), solver)
    return solver, states


def reference_hessians(model, windows, weighted):
    """The usual procedure with hooks on the modules: a whole pass per stop, weights before it already changed."""
    found = {}
    for stop in stops(weighted=weighted):
        inputs = []
        module = model.get_submodule(stop.leader.removesuffix(".weight"))
        hook = module.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0].flatten(0, 1)))
        for window in windows:
            model(input_ids=torch.tensor([window.ids]), use_cache=False)
        hook.remove()
        rows = torch.cat(inputs).double()
        if stop.groups[0].weighted:
            # A window's first token as often as there are tokens that read its key and value.
            counts = torch.cat([torch.tensor([len(window.ids)] + [1] * (len(window.ids) - 1)) for window in windows])
            rows = rows.repeat_interleave(counts, dim=0)
        found[stop.leader] = rows.T @ rows / len(rows)
        for name in stop.groups[0].members:
            dict(model.named_parameters())[name].mul_(0.5)
    return found


@RUNS
@pytest.mark.parametrize("weighted", [False, True], ids=["uniform", "attention"])
def test_hessians_are_those_of_a_full_pass_per_stop_with_hooks(run, weighted):
    windows = some_windows()
    with torch.no_grad():
        expected = reference_hessians(llama(), windows, weighted)
    solver, _ = collect(run, llama(), windows, weighted)
    assert list(solver.hessians) == [stop.leader for stop in stops()]
    for name, value in expected.items():
        torch.testing.assert_close(solver.hessians[name].double(), value, rtol=1e-4, atol=1e-6)
        assert solver.tokens[name] == 72


def target_at(name, shares_input_with, feeds_attention):
    grid = {"rows": 8, "columns": 8, "grid": GridSpec(), "transposed": False}
    return Target(
        name, (Location(name, 8),), 0, **grid, shares_input_with=shares_input_with, feeds_attention=feeds_attention
    )


def test_only_weights_that_feed_attention_get_token_weights():
    targets = [target_at("q", "q", True), target_at("k", "q", True), target_at("o", "o", False)]
    assert [(stop.groups[0].members, stop.groups[0].weighted) for stop in stops_of(targets, weighted=True)] == [
        (("q", "k"), True),
        (("o",), False),
    ]
    assert not any(stop.groups[0].weighted for stop in stops_of(targets))


def test_an_mlp_beside_the_attention_keeps_a_hessian_of_its_own():
    # As in GPT-J: both read the same tensor, but nobody reads what the MLP makes of the first token.
    targets = [target_at("q", "q", True), target_at("k", "q", True), target_at("up", "q", False)]
    found = stops_of(targets, weighted=True)
    assert [(stop.groups[0].members, stop.groups[0].weighted) for stop in found] == [
        (("q", "k"), True),
        (("up",), False),
    ]
    assert [stop.groups[0].members for stop in stops_of(targets)] == [("q", "k", "up")]


def test_once_and_passes_agree_to_the_bit():
    once, once_states = collect(run_once, llama(), some_windows())
    passes, passes_states = collect(run_in_passes, llama(), some_windows())
    for name, value in once.hessians.items():
        assert torch.equal(value, passes.hessians[name])
    for first, second in zip(once_states, passes_states, strict=True):
        assert torch.equal(first.hidden, second.hidden)


@RUNS
def test_outputs_are_those_of_the_quantized_block(run):
    model, windows = llama(), some_windows()
    before = states_of(model, windows)
    _, states = collect(run, model, windows)
    for state, old in zip(states, before, strict=True):
        expected = model.get_submodule(BLOCK)(old.hidden, **old.arguments[0].kwargs)
        assert torch.equal(state.hidden, expected)


def test_recorded_arguments_replay_the_whole_model():
    model, windows = llama(), some_windows((7, 12, 7))
    for state in states_of(model, windows):
        hidden = state.hidden
        for index, arguments in enumerate(state.arguments):
            hidden = arguments.call(model.get_submodule(f"model.layers.{index}"), hidden)
        ids = torch.tensor([windows[index].ids for index in state.windows])
        expected = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[-1]
        assert torch.equal(model.model.norm(hidden), expected)


def test_the_model_has_its_own_blocks_back_after_recording():
    model = llama()
    before = [id(block) for block in model.model.layers]
    states_of(model, some_windows())
    assert [id(block) for block in model.model.layers] == before


def test_each_window_runs_once_and_the_count_says_so():
    model, calls = llama(), []
    block = model.get_submodule(BLOCK)
    block.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[0]))
    states = states_of(model, some_windows())
    solver = Halving(dict(model.named_parameters()))
    forwards = run_once(segment(block), states, Collector(stops(), solver.parameters), solver)
    assert sum(calls) == 6 * forwards == 6
    calls.clear()
    forwards = run_in_passes(
        segment(block), states_of(model, some_windows()), Collector(stops(), solver.parameters), solver
    )
    assert sum(calls) == 6 * forwards == 30


def test_windows_of_any_length_are_never_padded_and_every_token_counts_once():
    # CASES A5: lengths 5, 17, 33, 64 in one go, or one by one, or in batches: the same Hessians, 119 tokens.
    windows = some_windows((5, 17, 33, 64, 17, 5))
    together = {}
    for tokens_per_batch in (1, 34, 4096):
        model = llama()
        states = states_of(model, windows, tokens_per_batch)
        solver = Halving(dict(model.named_parameters()))
        run_once(segment(model.get_submodule(BLOCK)), states, Collector(stops(), solver.parameters), solver)
        together[tokens_per_batch] = solver
    for solver in together.values():
        assert set(solver.tokens.values()) == {5 + 17 + 33 + 64 + 17 + 5}
        for name, value in solver.hessians.items():
            torch.testing.assert_close(value, together[1].hessians[name], rtol=1e-4, atol=1e-6)


def test_batches_hold_windows_of_one_length_and_all_of_them():
    windows = some_windows((5, 8, 5, 5, 8))
    batches = batches_of(windows, 10)
    assert [batch.windows for batch in batches] == [(0, 2), (3,), (1,), (4,)]
    for batch in batches:
        assert batch.inputs["input_ids"].tolist() == [list(windows[index].ids) for index in batch.windows]


@RUNS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_window_is_named_with_its_layer_and_channel(run, bad):
    # CASES A1: sample 7 of 16.
    model = llama()
    states = states_of(model, some_windows((32,) * 16), tokens_per_batch=96)
    state = next(state for state in states if 7 in state.windows)
    state.hidden[state.windows.index(7), 5, 3] = bad
    solver = Halving(dict(model.named_parameters()))
    with pytest.raises(NonFiniteError, match=r"q_proj\.weight: the input is nan in calibration window 7, token 5") as e:
        run(segment(model.get_submodule(BLOCK)), states, Collector(stops(), solver.parameters), solver)
    assert "channel" in str(e.value)
    assert "damping does not help" in str(e.value)
    assert not solver.hessians


class Routed(torch.nn.Module):
    """A block whose second weight is reached only by batches with a positive first element."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.rare = torch.nn.Linear(4, 4, bias=False)
        self.last = torch.nn.Linear(4, 4, bias=False)

    def forward(self, hidden):
        hidden = hidden + self.first(hidden)
        if hidden.flatten()[0] > 0:
            hidden = self.rare(hidden)
        return (self.last(hidden),)


def routed_states(signs):
    nothing = (BlockArguments((), {}, False),)
    return [
        BatchState(Batch({"input_ids": torch.zeros(1, 1)}, (index,)), torch.full((1, 3, 4), float(sign)), nothing)
        for index, sign in enumerate(signs)
    ]


@RUNS
def test_a_batch_that_skips_a_weight_does_not_hold_up_the_others(run):
    torch.manual_seed(0)
    block = Routed().requires_grad_(False)
    block.first.weight.zero_()
    stops = tuple(stop_at(f"{name}.weight") for name in ("first", "rare", "last"))
    solver = Halving(dict(block.named_parameters()))
    run(segment(block), routed_states([1, -1, 2]), Collector(stops, solver.parameters), solver)
    assert solver.tokens == {"first.weight": 9, "rare.weight": 6, "last.weight": 9}


@RUNS
def test_a_weight_that_no_batch_reaches_is_an_error_that_names_it(run):
    block = Routed().requires_grad_(False)
    block.first.weight.zero_()
    stops = tuple(stop_at(f"{name}.weight") for name in ("first", "rare", "last"))
    solver = Halving(dict(block.named_parameters()))
    with pytest.raises(CaptureError, match=r"rare\.weight"):
        run(segment(block), routed_states([-1, -2]), Collector(stops, solver.parameters), solver)


@RUNS
def test_weights_planned_to_share_inputs_that_do_not_are_an_error(run):
    model = llama()
    wrong = (stop_at(f"{BLOCK}.self_attn.q_proj.weight", f"{BLOCK}.mlp.up_proj.weight"),)
    solver = Halving(dict(model.named_parameters()))
    with pytest.raises(CaptureError, match=r"up_proj\.weight was planned to see the same inputs"):
        run(
            segment(model.get_submodule(BLOCK)),
            states_of(model, some_windows()),
            Collector(wrong, solver.parameters),
            solver,
        )


def test_an_error_in_the_solver_ends_every_batch_and_leaves_torch_usable():
    model = llama()

    def fail(members, statistics):
        raise RuntimeError("solver")

    with pytest.raises(RuntimeError, match="solver"):
        run_once(
            segment(model.get_submodule(BLOCK)),
            states_of(model, some_windows()),
            Collector(stops(), dict(model.named_parameters())),
            fail,
        )
    assert torch.overrides._get_current_function_mode_stack() == []
    solver, _ = collect(run_once, llama(), some_windows())
    assert len(solver.hessians) == 4


def test_a_model_that_repeats_its_blocks_is_refused():
    model = llama()
    looped = copy.copy(model)
    original = model.model.forward
    looped.forward = lambda input_ids, use_cache=None: original(
        inputs_embeds=model.model.layers[0](model.model.embed_tokens(input_ids)), use_cache=use_cache
    )
    with pytest.raises(CaptureError, match="not called in the order of the blocks, or more than once"):
        record_arguments(looped, ["model.layers.0", "model.layers.1"], [False, False], batches_of(some_windows(), 99))


def test_a_finished_block_keeps_no_activations_alive():
    gc.collect()
    gc.disable()
    try:
        model = llama()
        states = states_of(model, some_windows())
        alive = []
        module = model.get_submodule(f"{BLOCK}.mlp.down_proj")
        module.register_forward_pre_hook(lambda _, args: alive.append(weakref.ref(args[0])))
        solver = Halving(dict(model.named_parameters()))
        run_once(segment(model.get_submodule(BLOCK)), states, Collector(stops(), solver.parameters), solver)
        assert len(alive) == len(states)
        assert [reference() for reference in alive] == [None] * len(alive)
    finally:
        gc.enable()


def test_a_model_that_changes_the_hidden_state_between_blocks_is_refused():
    class Scaling(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

        def forward(self, input_ids):
            hidden = input_ids.unsqueeze(-1).expand(-1, -1, 4).float()
            for layer in self.layers:
                hidden = layer(hidden) * 0.5
            return hidden

    with pytest.raises(CaptureError, match=r"between blocks, before layers\.1"):
        record_arguments(Scaling(), ["layers.0", "layers.1"], [False, False], batches_of(some_windows(), 99))


def test_sixteen_bit_inputs_are_summed_in_float32():
    collector = Collector((stop_at("w"),), {})
    batch = BatchState(Batch({"input_ids": torch.zeros(1, 1)}, (0,)), torch.zeros(1, 3, 4), ())
    inputs = torch.ones(1, 3, 4, dtype=torch.bfloat16)
    collector.add(Product("w", inputs, inputs, 4, 4, False, 1, 0), batch)
    assert collector.take(collector.stops[0])["w"].sum.dtype == torch.float32


def test_masks_and_rotary_tables_that_are_equal_are_held_once():
    states = states_of(llama(), some_windows((8,) * 6), tokens_per_batch=16)
    assert len(states) == 3
    tables = [state.arguments[index].kwargs["position_embeddings"] for state in states for index in range(2)]
    assert len({id(table[0]) for table in tables}) == len({id(table[1]) for table in tables}) == 1
    assert not torch.equal(tables[0][0], tables[0][1])


@RUNS
def test_a_block_that_changes_the_shape_of_the_hidden_state_is_refused(run):
    class Widening(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(4, 8, bias=False)

        def forward(self, hidden):
            return self.up(hidden)

    block = Widening().requires_grad_(False)
    solver = Halving(dict(block.named_parameters()))
    with pytest.raises(CaptureError, match=r"turns a hidden state \[1, 3, 4\] into \[1, 3, 8\]"):
        run(segment(block), routed_states([1]), Collector((stop_at("up.weight"),), solver.parameters), solver)


@RUNS
def test_a_weight_that_tokens_may_be_routed_past_is_solved_without_statistics(run):
    block = Routed().requires_grad_(False)
    block.first.weight.zero_()
    rare = replace(stop_at("rare.weight"), may_be_skipped=True)
    asked = {}
    solver = Halving(dict(block.named_parameters()))

    def solve(stop, statistics):
        asked[stop.leader] = set(statistics)
        solver(stop, statistics)

    stops = stop_at("first.weight"), rare, stop_at("last.weight")
    run(segment(block), routed_states([-1, -2]), Collector(stops, solver.parameters), solve)
    assert asked == {"first.weight": {"first.weight"}, "rare.weight": set(), "last.weight": {"last.weight"}}
