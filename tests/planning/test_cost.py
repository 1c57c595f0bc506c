"""What a run over several processes is said to cost, against counted operations, counted bytes and real shares."""

import json
import runpy
from dataclasses import fields, replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.distributed.harness import make_model
from tests.problems import correlated_inputs
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from hessquant import cli
from hessquant import ranks as exchanging
from hessquant.calibration.batches import batches_of
from hessquant.capture.across import seen_by_all
from hessquant.capture.stops import stops_of
from hessquant.config import Config
from hessquant.core import gptq
from hessquant.core.factor import factorize
from hessquant.core.hessian import HessianAccumulator, HessianStatistics, hessian
from hessquant.kernels.dispatch import kernels_for
from hessquant.place import HOST
from hessquant.planning.cost import Job, Solve, Work, covered, estimate, own_windows, work
from hessquant.planning.job import attention_width, job_of
from hessquant.planning.plan import make_plan
from hessquant.planning.rates import ACCELERATOR, CORE
from hessquant.planning.size import TOKENS_PER_BATCH
from hessquant.ranks import ALONE, Ranks
from hessquant.records import GridSpec, TokenWindow
from hessquant.run.dividing import solve_divided
from hessquant.run.solve import TargetSolver
from hessquant.run.way import first_way

DOCS = Path(__file__).parents[2] / "docs"

DIVIDED = ("products", "attention", "sums", "search", "sweep", "loop")

PLAIN = Solve(columns=256, rows=(768, 512), scales=26, code_bytes=256, grid_bytes=12)
STACK = Solve(columns=256, rows=(64, 64), scales=26, code_bytes=256, grid_bytes=12, experts=12, seen=0.25)
JOB = Job(
    windows=64,
    length=128,
    windows_per_batch=16,
    products=1e6,
    attention=512,
    solves=((PLAIN, 3), (STACK, 2)),
    block_bytes=10**6,
    source_bytes=2 * 10**6,
    written=10**6,
)


class Wire:
    """torch.distributed of a process whose peers have what it has; counts the bytes that come from them."""

    def __init__(self, rank, count):
        self.rank, self.count, self.received, self.told, self.exchanges = rank, count, 0, 0, 0
        self.summed = None

    def all_to_all_single(self, received, sent):
        parts = sent.view(self.count, -1)
        received.view(self.count, -1).copy_(parts[self.rank].expand_as(parts))
        self.summed = self.count * parts
        self.received += sent.nbytes - sent.nbytes // self.count
        self.exchanges += 1

    def all_gather(self, received, sent):
        others = [sent] * self.count if self.summed is None else self.summed
        for each, other in zip(received, others, strict=True):
            each.copy_(other)
        self.summed = None
        self.received += sent.nbytes * (self.count - 1)
        self.exchanges += 1

    def gather(self, sent, received, dst):
        assert (received is not None) == (dst == self.rank)
        for each in received or ():
            each.copy_(sent)
        self.received += sent.nbytes * (self.count - 1) * (dst == self.rank)
        self.exchanges += 1

    def broadcast_object_list(self, told, src):
        parts = [weight for weight, _ in told[0]]
        self.told += sum(each.nbytes for part in parts for each in (part.codes, part.grid.scales, part.grid.zeros))
        self.exchanges += 2

    def all_gather_object(self, told, value):
        told[:] = [value] * self.count
        self.exchanges += 2


@pytest.fixture
def wire(monkeypatch):
    """Gives a process of several, and what counts its bytes."""

    def wire(rank, count):
        counting = Wire(rank, count)
        monkeypatch.setattr(exchanging, "dist", counting)
        return Ranks(rank, count), counting

    return wire


def flops(call, *kinds):
    """Operations of matrix products, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        call()
    counts = counter.get_flop_counts()["Global"]
    return sum(each for name, each in counts.items() if not kinds or str(name).removeprefix("aten.") in kinds)


def of_one(columns, rows, config=None):
    """What is counted for one weight, tokens apart."""
    config = config or Config()
    solve = Solve(columns, (rows,), scales=26)
    return work(Job(0, 1, 1, 0, 0, ((solve, 1),), config.block_size, config.refinement_rounds), ALONE)


@pytest.mark.parametrize("columns", [64, 192, 500, 1024])
def test_sums_are_those_that_torch_counts(columns):
    accumulator, inputs = HessianAccumulator(), torch.randn(32, columns)
    assert flops(lambda: accumulator.add(inputs)) == 2 * 32 * covered(columns)
    job = Job(1, 32, 1, 0, 0, ((Solve(columns, (1,)), 5),))
    assert work(job, ALONE).sums == 5 * 2 * 32 * covered(columns)


@pytest.mark.parametrize(("rows", "columns"), [(32, 256), (8, 512)])
@pytest.mark.parametrize("rounds", [0, 2])
def test_products_of_a_solve_are_those_that_torch_counts(rows, columns, rounds):
    config, spec, accumulator = Config(block_size=64, refinement_rounds=rounds), GridSpec(4, 64), HessianAccumulator()
    accumulator.add(correlated_inputs(columns, columns, 0).float())
    mean, weight = hessian(accumulator.take()), torch.randn(rows, columns)
    factor = factorize(mean, damping=0.01, order="activation", group_width=64, dtype=torch.float32)
    kernels = kernels_for(HOST.device, 1 << 30)
    counted = flops(lambda: gptq.solve(weight, mean, factor, spec, config, kernels))
    told = of_one(columns, rows, config)
    assert told.sweep == counted if not rounds else told.sweep == pytest.approx(counted, rel=0.1)
    assert (told.search, told.loop) == (26 * rows * columns, (1 + rounds) * rows * columns * 64)
    assert told.factor == columns**3 / 3


def plan_of(saved, config, settings, processes=None):
    source, tensors = saved(config)
    plan = make_plan(source, tensors, settings, processes=processes)
    width = attention_width(source.config, plan.hidden_size)
    return plan, job_of(plan, settings, windows_per_batch=1, passes=False, attention_width=width)


BASE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
BASE |= {"vocab_size": 97, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def test_a_toy_is_counted_as_by_hand(saved):
    shape = LlamaConfig(**BASE, intermediate_size=96)
    settings = Config(group_size=32, window_length=8, num_windows=3)
    _, job = plan_of(saved, shape, settings)
    # q and o 64 x 64, k and v 32 x 64, gate and up 96 x 64, down 64 x 96; two blocks.
    assert job.products == 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64)
    assert job.attention == 2 * 64
    assert sorted((one.columns, one.rows, count) for one, count in job.solves) == [
        (64, (64,), 2),
        (64, (64, 32, 32), 2),
        (64, (96, 96), 2),
        (96, (64,), 2),
    ]
    done = work(job, ALONE)
    assert done.factor == 2 * (3 * 64**3 + 96**3) / 3
    assert done.sums == 2 * (3 * 64**2 + 96**2) * 2 * 24
    assert done.search == 26 * job.products
    assert {one.grid_bytes for one, _ in job.solves} == {2 * 3, 3 * 3}
    assert done.received == done.exchanges == 0


def test_products_of_a_forward_pass_are_those_that_torch_counts(saved):
    shape = LlamaConfig(**BASE, intermediate_size=96)
    _, job = plan_of(saved, shape, Config(group_size=32, window_length=8, num_windows=3))
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="eager").model
    tokens = torch.zeros(3, 8, dtype=torch.int64)
    with torch.no_grad():
        assert flops(lambda: model(tokens), "mm", "addmm") == work(job, ALONE).products
        of_attention = flops(lambda: model(tokens), "bmm")
    # Eager attention takes both halves of the square.
    assert of_attention == 2 * work(job, ALONE).attention


def test_shapes_of_the_simulation_are_those_of_a_plan(saved):
    made = runpy.run_path(str(DOCS.parent / "benchmarks" / "scaling_model.py"))
    simulated = made["job"](made["llama"](2, 64, 96, 32, 97), 1)
    _, job = plan_of(saved, LlamaConfig(**BASE, intermediate_size=96), Config(group_size=32))
    told = [(one.windows, one.length, one.products, one.attention, one.written) for one in (simulated, job)]
    assert told[0] == told[1]
    first, second = (
        {(one.columns, one.rows, one.scales): count for one, count in of.solves} for of in (simulated, job)
    )
    assert first == second
    # 2 bytes for each: blocks, embeddings and head.
    assert simulated.source_bytes == 2 * (job.written + 2 * 64 * 97)


def test_experts_run_twice_and_see_their_share_of_the_tokens(saved):
    shape = Qwen3MoeConfig(**BASE, **EXPERTS, intermediate_size=96)
    settings = Config(group_size=32, window_length=8, num_windows=3)
    _, job = plan_of(saved, shape, settings)
    of_attention, router, of_expert = 2 * 64 * 64 + 2 * 32 * 64, 4 * 64, 3 * 64 * 32
    assert job.products == 2 * (of_attention + router + 2 * 2 * of_expert)
    stacks = {one.columns: one for one, _ in job.solves if one.experts}
    assert {columns: (one.rows, one.experts, one.seen) for columns, one in stacks.items()} == {
        64: ((32, 32), 4, 0.5),
        32: ((64,), 4, 0.5),
    }
    _, seen_by_every_expert = plan_of(saved, shape, replace(settings, experts="all"))
    assert {one.seen for one, _ in seen_by_every_expert.solves} == {1.0}


def test_passes_run_what_is_before_each_stop_again(saved):
    shape = LlamaConfig(**BASE, intermediate_size=96)
    settings = Config(group_size=32, window_length=8, num_windows=3, capture="passes")
    plan, once = plan_of(saved, shape, settings)
    passes = job_of(plan, settings, windows_per_batch=1, passes=True, attention_width=64)
    qkv, o, mlp, down = 64 * 128, 64 * 64, 2 * 96 * 64, 96 * 64
    assert passes.products - once.products == 2 * (0 + qkv + (qkv + o) + (qkv + o + mlp))
    assert once.products == 2 * (qkv + o + mlp + down)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 9))
def test_windows_fall_to_processes_as_in_a_run(windows, per_batch, count):
    batches = batches_of([TokenWindow(tuple(range(4)))] * windows, 4 * per_batch)
    plan = SimpleNamespace(targets=(), blocks=(), hidden_size=8)
    job = replace(JOB, windows=windows, windows_per_batch=per_batch)
    for rank in range(count):
        way = first_way(plan, batches, Config(), HOST, Ranks(rank, count))
        assert own_windows(job, Ranks(rank, count)) == sum(len(batch.windows) for batch in way.batches)


@given(st.integers(1, 70))
def test_divided_work_sums_to_the_whole(count):
    alone = work(JOB, ALONE)
    each = [work(JOB, Ranks(rank, count)) for rank in range(count)]
    for kind in DIVIDED:
        assert sum(getattr(one, kind) for one in each) == pytest.approx(getattr(alone, kind))
    # Every process factors a weight's Hessian; of experts each has its own.
    plain, stack = 3 * 256**3 / 3, 2 * 12 * 256**3 / 3
    assert alone.factor == pytest.approx(plain + stack)
    assert sum(one.factor for one in each) == pytest.approx(count * plain + stack)
    assert sum(one.audit for one in each) == JOB.source_bytes
    assert sum(one.read for one in each) == count * JOB.block_bytes
    assert (alone.received, alone.exchanges) == (0, 0)


@pytest.mark.parametrize("rates", [CORE, ACCELERATOR], ids=["core", "accelerator"])
def test_one_more_process_takes_no_longer_but_for_exchanges(rates):
    def apart_from_exchanges(count):
        cost = estimate(JOB, rates, count)
        assert cost.seconds == pytest.approx(sum(stage.seconds for stage in cost.stages))
        assert cost.seconds_undivided <= cost.seconds
        assert cost.speed_up <= cost.limit
        return sum(stage.seconds for stage in cost.stages if stage.name != "exchanges")

    seconds = [apart_from_exchanges(count) for count in range(1, 65)]
    assert all(later <= earlier for earlier, later in pairwise(seconds))
    # With a window, and no row or expert more to give, what is left is what is not divided.
    one = estimate(JOB, rates, 1)
    assert one.seconds == one.seconds_of_one
    assert one.speed_up == 1
    assert one.received_bytes == 0


def test_a_stage_takes_what_its_counts_take_at_the_rates():
    rates = replace(CORE, **{each.name: 1.0 for each in fields(CORE) if each.name not in ("title", "measured")})
    cost, done = estimate(JOB, rates, 1), work(JOB, ALONE)
    counts = {each.name: getattr(done, each.name) for each in fields(Work)}
    assert cost.seconds == pytest.approx(1 + sum(counts.values()))
    double = estimate(JOB, replace(rates, sums=2.0), 1)
    assert cost.seconds - double.seconds == pytest.approx(counts["sums"] / 2)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_bytes_of_a_weight_are_those_that_are_exchanged(rank, count, wire, monkeypatch):
    ranks, counting = wire(rank, count)
    monkeypatch.setattr(exchanging, "PIECE_BYTES", 20_000)
    monkeypatch.setattr("hessquant.planning.cost.PIECE_BYTES", 20_000)
    columns, rows, spec, config = 128, 50, GridSpec(4, 32), Config()
    inputs = correlated_inputs(256, columns, 0).float()
    total = inputs.T @ inputs
    ranks.sum(total.clone())
    factor = factorize(total, damping=0.01, order="activation", group_width=32, dtype=torch.float32)
    kernels = kernels_for(HOST.device, 0)
    solve_divided(torch.randn(rows, columns), total, factor, spec, config, kernels, ranks)
    one = Solve(columns, (rows,), code_bytes=columns, grid_bytes=4 * (2 + 1))
    told = work(Job(0, 1, 1, 0, 0, ((one, 1),)), ranks)
    assert told.received == counting.received > 4 * columns**2 / 2
    assert told.exchanges == counting.exchanges + 2  # what each has seen of the inputs is told before
    assert told.received < 3 * (4 * columns**2 + rows * columns)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_bytes_of_experts_are_those_that_are_exchanged(rank, wire, saved):
    config = Config(group_size=32, window_length=8, num_windows=3)
    plan, job = plan_of(saved, Qwen3MoeConfig(**BASE, **EXPERTS, intermediate_size=96), config)
    ranks, counting = wire(rank, 3)
    members = [target for target in plan.targets if target.block == 0 and target.module]
    (stop,) = stops_of(members)
    parameters = {}
    for target in members:
        location = target.locations[0]
        shape = (4, 64, 64) if "gate_up" in location.parameter else (4, 64, 32)
        parameters.setdefault(location.parameter, torch.randn(shape))
    columns = {target.name: target.columns for target in members}
    seen = {}
    for group in stop.groups:
        inputs = correlated_inputs(64, columns[group.leader], 0).float()
        seen[group.leader] = HessianStatistics(inputs.T @ inputs, 64.0, 64)
    solver = TargetSolver(members, parameters, config, lambda record: None, ranks)
    solver.quantize(stop, seen_by_all(stop, seen, parameters, ranks))
    stacks = replace(job, solves=tuple((one, 1) for one, _ in job.solves if one.experts))
    own = {0: 1, 1: 1, 2: 2}[rank]
    of_expert = 3 * 64 * 32 + (32 + 32) * 2 * 3 + 64 * 1 * 3
    assert counting.told == own * of_expert
    assert work(stacks, ranks).received == counting.received + (4 - own) * of_expert
    # Of both stacks together it is told once what each has seen.
    assert work(stacks, ranks).exchanges == counting.exchanges + 2


def test_a_plan_has_what_was_asked_for_and_is_no_other_plan(saved):
    shape = LlamaConfig(**BASE, intermediate_size=96)
    settings = Config(group_size=32, window_length=64, num_windows=64)
    plain, _ = plan_of(saved, shape, settings)
    plan, job = plan_of(saved, shape, settings, processes=4)
    assert plain.cost is None
    assert plan == plain
    job = replace(job, windows_per_batch=TOKENS_PER_BATCH // 64)
    assert plan.cost == replace(estimate(job, CORE, 4), memory_bytes=plan.cost.memory_bytes)
    # Each holds a quarter of the windows.
    quarter, _ = plan_of(saved, shape, replace(settings, num_windows=ceil(64 / 4)))
    assert plan.cost.memory_bytes == quarter.memory_bytes < plan.memory_bytes


def test_rates_of_a_core_are_those_that_were_fitted():
    fitted = json.loads((DOCS / "figures" / "growth.json").read_text())["rates"]
    assert {kind: getattr(CORE, kind) for kind in fitted} == pytest.approx(fitted, rel=0.01)


def test_the_figure_is_that_of_the_measurements():
    drawn = runpy.run_path(str(DOCS / "figures" / "make.py"))["growth"]({})
    assert (DOCS / "figures" / "growth.svg").read_text(encoding="utf-8") == drawn, "run: python docs/figures/make.py"
    assert "(figures/growth.svg)" in (DOCS / "scaling.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model("dense", tmp_path_factory.mktemp("cost") / "model")


SETTINGS = ("--group-size", "32", "--num-windows", "8", "--window-length", "64")


def test_plan_prints_what_a_run_costs(model, capsys):
    words = ["plan", str(model), "--calibration", str(model.parent / "text.txt"), *SETTINGS]
    assert cli.main([*words, "--processes", "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for said in (
        "2, each as fast as one core of the machine that docs/scaling.md names",
        ": an estimate",
        "times one process, which takes",
        "each receives up to",
    ):
        assert said in printed
    assert cli.main([*words, "--processes", "2", "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    assert cost["processes"] == 2
    assert cost["speed_up"] == pytest.approx(cost["seconds_of_one"] / cost["seconds"])
    assert cost["received_bytes"] > 0
    assert sum(stage["seconds"] for stage in cost["stages"]) == pytest.approx(cost["seconds"])


@pytest.mark.parametrize("given", ["0", "-2", "two"])
def test_numbers_that_mean_nothing_are_refused(given, capsys):
    assert cli.main(["plan", "nowhere", "--processes", given]) == 2
    assert "processes" in capsys.readouterr().err
