"""Whether the machine holds a run, and what makes it fit: by one estimate."""

import json
import re
import shlex
from dataclasses import replace

import pytest

from hessquant import memory
from hessquant.config import Config
from hessquant.options import parse_size
from hessquant.planning import make_plan
from hessquant.report.json_report import to_json
from hessquant.report.terminal import render_plan

GROUPS = {"num_windows": 4096, "window_length": 512, "group_size": 32}


@pytest.fixture
def on_machine(llama, monkeypatch):
    """Makes the plan on a machine with so much memory."""
    source, tensors = llama()

    def plan(total, **settings):
        monkeypatch.setattr(memory, "total_memory", lambda: total)
        return make_plan(source, tensors, Config(**GROUPS | settings))

    return plan


def applied(options, settings):
    """Settings with the options of a remedy."""
    words = shlex.split(options)
    for option, value in zip(words[::2], words[1::2], strict=True):
        match option:
            case "--capture":
                settings = settings | {"capture": value}
            case "--activation-memory":
                settings = settings | {"activation_memory": parse_size("activation_memory", value)}
            case "--num-windows":
                settings = settings | {"num_windows": int(value)}
            case "--exclude":
                settings = settings | {"exclude": (*settings.get("exclude", ()), value)}
            case _:
                raise AssertionError(option)
    return settings


def text_of(plan, capsys):
    from rich.console import Console

    Console(width=200).print(render_plan(plan))
    return capsys.readouterr().out


def test_what_is_free_now_does_not_count(llama, monkeypatch):
    source, tensors = llama()
    plans = []
    for available in (1 << 20, 1 << 40):
        found = {"total": 8 << 30, "available": available, "free": available, "used": 0}
        monkeypatch.setattr(memory.psutil, "virtual_memory", lambda found=found: type("V", (), found)())
        plans.append(to_json(make_plan(source, tensors, Config(**GROUPS))))
    assert plans[0] == plans[1]


def test_a_machine_that_holds_it_is_told_nothing(on_machine, capsys):
    plan = on_machine(1 << 40)
    assert plan.fits
    assert plan.remedies == ()
    assert "cannot hold" not in text_of(plan, capsys)
    assert "of the machine's 1.0 TiB" in text_of(plan, capsys)


@pytest.mark.parametrize("settings", [{}, {"capture": "once"}, {"capture": "passes"}, {"refinement_rounds": 1}])
def test_every_remedy_fits_by_the_estimate_of_the_plan_that_it_makes(on_machine, settings):
    needed = on_machine(16 << 30, activation_memory=12 << 30, **settings).memory_bytes
    least = on_machine(16 << 30, activation_memory=0, **settings | {"capture": "passes"}).memory_bytes
    kinds = set()
    for total in (needed - 1, (needed + least) // 2, least + 1):
        plan = on_machine(total, activation_memory=12 << 30, **settings)
        assert not plan.fits
        assert plan.remedies
        for remedy in plan.remedies:
            changed = on_machine(total, **applied(remedy.options, {"activation_memory": 12 << 30} | settings))
            assert changed.memory_bytes == remedy.memory_bytes <= total
            kinds.update(re.findall("--[a-z-]+", remedy.options))
    assert settings.get("capture") == "once" or "--activation-memory" in kinds
    assert "--num-windows" in kinds


def test_windows_are_not_reduced_below_a_token_per_input(on_machine):
    plan = on_machine(16 << 30, num_windows=1, window_length=300, activation_memory=0)
    cramped = on_machine(plan.memory_bytes - 1, num_windows=1, window_length=300, activation_memory=1 << 30)
    assert not any("--num-windows" in remedy.options for remedy in cramped.remedies)


def test_where_no_memory_for_activations_helps_the_widest_weights_are_to_be_left_out(on_machine, capsys):
    few = {"num_windows": 1, "window_length": 300}
    least = on_machine(16 << 30, capture="passes", activation_memory=0, **few)
    assert least.least_memory_bytes == least.memory_bytes
    plan = on_machine(least.memory_bytes - 1, **few)
    (remedy,) = plan.remedies
    assert "--exclude 'model.layers.*.mlp.down_proj'" in remedy.options
    assert on_machine(1 << 40, **applied(remedy.options, few)).memory_bytes == remedy.memory_bytes
    assert "This machine cannot hold it" in text_of(plan, capsys)


def test_a_machine_that_nothing_helps_is_told_what_it_takes_at_least(on_machine, capsys):
    plan = on_machine(1000)
    assert (plan.fits, plan.remedies) == (False, ())
    said = text_of(plan, capsys)
    assert "the weights of one block and one factorisation take about" in said
    assert "more memory" in said


def test_programs_are_told_too(on_machine):
    needed = on_machine(16 << 30, activation_memory=12 << 30).memory_bytes
    told = json.loads(to_json(on_machine(needed - 1, activation_memory=12 << 30)))
    assert told["memory_bytes"] == needed
    assert told["machine_memory"] == needed - 1
    assert {"options", "memory_bytes"} == set(told["remedies"][0])


def test_the_plan_of_a_report_says_nothing_of_the_machine(on_machine):
    plan = on_machine(1 << 40)
    assert replace(plan, machine_memory=0, remedies=()) == plan
