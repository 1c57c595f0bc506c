import pytest
import torch

from hessquant.models.watch import Watch


def seen(parameters, run):
    products = []
    with Watch(parameters, products.append):
        run()
    return products


def weight(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


X = weight(5, 8)


@pytest.mark.parametrize(
    ("stored", "run", "rows", "transposed"),
    [
        (weight(6, 8), lambda w: torch.nn.functional.linear(X, w), 6, False),
        (weight(8, 6), lambda w: X @ w, 6, True),
        (weight(8, 6), lambda w: torch.addmm(torch.zeros(6), X, w), 6, True),
        (weight(6, 8), lambda w: X @ w.T, 6, False),
        (weight(6, 8), lambda w: torch.mm(w, X.T), 6, False),
        (weight(8, 8), lambda w: X @ w, 8, True),
        (weight(8, 8), lambda w: torch.nn.functional.linear(X, w.T), 8, True),
    ],
)
def test_the_side_and_the_orientation_are_seen(stored, run, rows, transposed):
    (product,) = seen({"w": stored}, lambda: run(stored))
    assert (product.name, product.rows, product.columns, product.transposed) == ("w", rows, 8, transposed)
    assert (product.pieces, product.piece) == (1, 0)
    assert torch.equal(product.inputs.reshape(-1, 8), X)


@pytest.mark.parametrize("transposed", [False, True])
def test_one_matrix_of_a_stack_is_known_by_its_place_in_memory(transposed):
    stack = weight(3, 8, 8)
    run = (lambda: X @ stack[2]) if transposed else (lambda: torch.nn.functional.linear(X, stack[2]))
    (product,) = seen({"w": stack}, run)
    assert (product.pieces, product.piece, product.transposed) == (3, 2, transposed)


def test_all_matrices_of_a_stack_at_once_have_inputs_each():
    stack, inputs = weight(3, 8, 6), weight(3, 5, 8)
    (product,) = seen({"w": stack}, lambda: torch.bmm(inputs, stack))
    assert (product.pieces, product.piece, product.rows, product.transposed) == (3, None, 6, True)
    assert product.inputs is inputs


def test_parts_of_one_storage_are_told_apart():
    # As loading leaves them that takes one tensor of a checkpoint apart.
    first, second, third = weight(24, 8).chunk(3)
    products = seen({"a": first, "b": second, "c": third}, lambda: [X @ third.T, X @ first.T, X @ second.T])
    assert [product.name for product in products] == ["c", "a", "b"]


@pytest.mark.parametrize(
    "run", [lambda w: X @ w[:4].T, lambda w: X[:, :4] @ w[:, :4].T, lambda w: X[:, :4] @ w[:, 4:].T]
)
def test_what_is_no_equal_part_is_marked(run):
    stored = weight(6, 8)
    (product,) = seen({"w": stored}, lambda: run(stored))
    assert product.pieces == 0


def test_a_copy_is_not_the_parameter():
    stored = weight(6, 8)
    assert not seen({"w": stored}, lambda: X @ stored.clone().T)
