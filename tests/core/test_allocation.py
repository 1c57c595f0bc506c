"""Choosing options within a budget, against all choices that there are."""

from itertools import accumulate, product

import pytest
import torch

from hessquant.core.allocation import Option, allocate


def things(seed, count=5, options=4):
    """Things whose options cost less, mostly, the larger they are."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 20, (count, options), generator=generator)
    costs = torch.rand(count, options, generator=generator) * 40 / sizes
    pairs = (
        zip(of_size.tolist(), of_cost.tolist(), strict=True) for of_size, of_cost in zip(sizes, costs, strict=True)
    )
    return [[Option(*pair) for pair in of_thing] for of_thing in pairs]


def total(chosen):
    return sum(option.size for option in chosen), sum(option.cost for option in chosen)


def best(problem, budget):
    """The least cost of all choices that fit."""
    return min(cost for size, cost in map(total, product(*problem)) if size <= budget)


@pytest.mark.parametrize("seed", range(20))
def test_the_least_cost_of_all_choices_lies_between_the_bound_and_what_is_chosen(seed):
    problem = things(seed)
    least = sum(min(option.size for option in options) for options in problem)
    for budget in range(least, least + 60, 7):
        choice = allocate(problem, budget)
        size, cost = total([options[at] for options, at in zip(problem, choice.taken, strict=True)])
        assert size <= budget
        assert cost == pytest.approx(choice.cost)
        assert choice.bound <= best(problem, budget) + 1e-9
        assert best(problem, budget) <= cost + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_a_budget_that_ends_with_a_step_is_used_at_the_least_cost(seed):
    problem = things(seed)
    steps = len({allocate(problem, budget).cost for budget in range(5, 100) if fits(problem, budget)})
    assert steps > 1
    for budget in range(5, 100):
        if fits(problem, budget) and (choice := allocate(problem, budget)).cost == pytest.approx(choice.bound):
            assert choice.cost == pytest.approx(best(problem, budget))


def fits(problem, budget):
    return budget >= sum(min(option.size for option in options) for options in problem)


def test_more_budget_never_costs_more():
    problem = things(3, count=12, options=6)
    budgets = [budget for budget in range(200) if fits(problem, budget)]
    costs = [allocate(problem, budget).bound for budget in budgets]
    assert costs == pytest.approx(list(accumulate(costs, min)))


def test_an_option_that_is_larger_and_costs_more_is_never_taken():
    choice = allocate([[Option(1, 5.0), Option(2, 6.0), Option(3, 1.0)]] * 3, 8)
    assert choice.taken.count(1) == 0
    assert choice.taken.count(2) == 2


def test_of_options_of_one_size_the_cheapest_is_taken():
    assert allocate([[Option(2, 5.0), Option(2, 3.0), Option(2, 4.0)]], 2).taken == [1]


def test_without_a_choice_there_is_nothing_to_gain():
    choice = allocate([[Option(4, 2.5)], [Option(1, 1.0)]], 100)
    assert choice == ([0, 0], 3.5, 3.5)
