"""The pretend device refuses what a GPU refuses, and computes what the CPU computes."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional

RANDOM = torch.Generator().manual_seed(0)


def random(*shape):
    return torch.randn(shape, generator=RANDOM)


@pytest.fixture
def device(accelerator):
    return accelerator.device


def cholesky_out(matrix):
    info = torch.empty((), dtype=torch.int32, device=matrix.device)
    matrix = matrix @ matrix.T + 10 * torch.eye(len(matrix), device=matrix.device)
    upper = matrix.T
    torch.linalg.cholesky_ex(upper, upper=True, out=(upper, info))
    return matrix  # which the factor was written into


def addmm_out(left, right):
    total = torch.zeros(12, 12, device=left.device)
    torch.addmm(total[3:6, 3:6], left.T, right, out=total[3:6, 3:6])
    total[:2, 4:10:2].copy_(right[:2])
    return total


def baddbmm_out(left, right):
    total = torch.zeros(2, 2, 6, device=left.device)
    view = total[:, :, ::2]
    torch.baddbmm(view, left.view(2, 2, 2), right.view(2, 2, 3)[:, :, :3], out=view)
    return total


def put(target, values):
    places = torch.tensor([3, 1], device=target.device), torch.tensor([0, 2], device=target.device)
    target.index_put_(places, values, accumulate=True)
    target[target > 1] = 0
    target.scatter_(1, torch.zeros(1, 2, dtype=torch.int64, device=target.device), 5.0)
    return target


def rotated(pairs):
    turned = torch.view_as_complex(pairs) * torch.polar(torch.ones_like(pairs[..., 0]), pairs[..., 1])
    return torch.view_as_real(turned.conj() * turned)


COMPUTED = {
    "arithmetic": (lambda a, b: (a + b) * 2 - a / b.abs().clamp(min=0.1) ** 2, (4, 6), (4, 6)),
    "numbers": (
        lambda a: torch.where(a > 0.1, a * 0.1, a.double() / 3 + 0.3) - torch.where(a[0, 0] > 0, 0.1, a[0, 0]),
        (4, 6),
    ),
    "broadcast": (lambda a, b: torch.where(a > b, a, 2.0), (4, 6), (6,)),
    "in place": (lambda a, b: a.mul_(b).add_(1).clamp_(0, 2).round_(), (4, 6), (4, 6)),
    "product": (lambda a, b: a @ b, (2, 4, 6), (6, 3)),
    "einsum": (lambda a, b: torch.einsum("ij,kj->ik", a, b), (4, 6), (3, 6)),
    "reductions": (lambda a: torch.cat([a.sum(1), a.amax(1), a.std(1), a.logsumexp(1)]), (4, 6)),
    "sorting": (lambda a: torch.sort(a, descending=True, stable=True)[1].flip(0), (40,)),
    "top k": (lambda a: torch.cat(torch.topk(a, 3)), (40,)),
    "bits": (lambda a: (a * 8).to(torch.int32).bitwise_and(7).to(torch.uint8) << 1, (4, 6)),
    "half": (lambda a: (a.half() / 3).bfloat16(), (4, 6)),
    "views": (lambda a: a.T.reshape(3, -1)[1:, ::2].unfold(0, 2, 1).unsqueeze(0).expand(2, -1, -1, -1), (4, 6)),
    "boolean mask": (lambda a: a[a > 0], (4, 6)),
    "gather": (lambda a: a.gather(0, a.argsort(0)), (4, 6)),
    "factor": (cholesky_out, (6, 6)),
    "sums into a view": (addmm_out, (4, 3), (4, 3)),
    "batches into a view": (baddbmm_out, (8,), (12,)),
    "indexed writes": (put, (4, 3), (2,)),
    "complex": (rotated, (5, 2)),
    "chunks": (lambda a: torch.stack(a.chunk(2, 1)).cumsum(0), (4, 6)),
    "embedding": (lambda a: functional.embedding(torch.arange(3, device=a.device), a), (4, 6)),
    "linear": (functional.linear, (2, 5, 6), (4, 6), (4,)),
    "convolution": (lambda a, b: functional.conv1d(a, b, padding=2, groups=4), (2, 4, 9), (4, 1, 3)),
    "attention": (lambda a: functional.scaled_dot_product_attention(a, a, a, is_causal=True), (1, 2, 40, 8)),
    "norms": (lambda a, b: functional.rms_norm(functional.layer_norm(a, (6,), b, b), (6,), b), (4, 6), (6,)),
    "group norm": (lambda a: functional.group_norm(a, 2), (2, 4, 6)),
    "activations": (lambda a: functional.softmax(functional.silu(a) + functional.gelu(a), -1), (4, 6)),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_results_are_the_cpus(name, device):
    compute, *shapes = COMPUTED[name]
    operands = [random(*shape) for shape in shapes]
    there = [operand.to(device) for operand in operands]
    result = compute(*there)
    assert result.device == device
    expected = compute(*operands)
    assert result.dtype == expected.dtype
    assert result.stride() == expected.stride()
    assert torch.equal(result.cpu(), expected)
    # And what was changed in its place was changed there too.
    assert all(torch.equal(one.cpu(), other) for one, other in zip(there, operands, strict=True))


def test_integers_are_counted_as_a_gpu_counts_them(device):
    counts = torch.histc(torch.tensor([0, 3, 1, 3], dtype=torch.int32, device=device), bins=4, min=0, max=3)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [1, 1, 0, 2]


MIXED = {
    "sum": lambda here, there: here + there,
    "in place": lambda here, there: there.mul_(here),
    "in place on the host": lambda here, there: here.mul_(there),
    "number on the device": lambda here, there: here * there.sum(),
    "into a number of the host": lambda here, there: here.sum().add_(there.sum()),
    "out on the host": lambda here, there: torch.mul(there, there, out=here),
    "out on the device": lambda here, there: torch.mul(here, here, out=there),
    "product": lambda here, there: here @ there,
    "sum into a view": lambda here, there: torch.addmm(there, here, there, out=there[:]),
    "batches": lambda here, there: torch.baddbmm(there[None], there[None], here[None]),
    "linear": lambda here, there: functional.linear(there, here),
    "bias": lambda here, there: functional.linear(there, there, here[0]),
    "embedding": lambda here, there: functional.embedding(torch.arange(2), there),
    "attention": lambda here, there: functional.scaled_dot_product_attention(there[None], here[None], there[None]),
    "convolution": lambda here, there: functional.conv1d(there[None], here[None]),
    "norm": lambda here, there: functional.layer_norm(there, (3,), here[0]),
    "choice": lambda here, there: torch.where(there > 0, there, here),
    "concatenation": lambda here, there: torch.cat([there, here]),
    "index on the device": lambda here, there: here[torch.arange(2, device=there.device)],
    "mask on the device": lambda here, there: here[there > 0],
    "mask": lambda here, there: there.masked_fill(here > 0, 0),
    "values put": lambda here, there: there.index_put_((torch.arange(3),), here),
    "gather": lambda here, there: there.gather(0, torch.zeros(1, 3, dtype=torch.int64)),
    "index select": lambda here, there: there.index_select(0, torch.arange(2)),
    "lists": lambda here, there: torch._foreach_add([there], [here]),
    "equal": lambda here, there: torch.equal(there, here),
    "storage": lambda here, there: there.set_(here),
}


@pytest.mark.parametrize("name", MIXED)
def test_an_operation_that_mixes_devices_is_refused(name, device):
    here = random(3, 3)
    there = here.to(device)
    with pytest.raises(RuntimeError):
        MIXED[name](here, there)
    assert torch.equal(there.cpu(), here)


NUMBERS_AND_INDICES = {
    "factor": lambda there: there * torch.tensor(2.0),
    "first": lambda there: torch.tensor(2.0) - there,
    "filling": lambda there: there.masked_fill(there > 0, torch.tensor(1.0)),
    "choice": lambda there: torch.where(there > 0, torch.tensor(1.0), there),
    "index": lambda there: there[torch.tensor([2, 0])],
    "number put": lambda there: there.index_put_((torch.tensor([2, 0]),), torch.tensor(1.0)),
    "written": lambda there: there.copy_(torch.ones(3, 3)),
    "part written": lambda there: there.__setitem__((slice(1, 2), 0), torch.ones(1)) or there,
}


@pytest.mark.parametrize("name", NUMBERS_AND_INDICES)
def test_a_number_an_index_and_what_is_copied_may_be_on_the_host(name, device):
    compute, values = NUMBERS_AND_INDICES[name], random(3, 3)
    result = compute(values.to(device))
    assert result.device == device
    assert torch.equal(result.cpu(), compute(values))


def test_there_is_no_way_to_its_values_but_a_copy(device):
    there = torch.ones(3, device=device)
    with pytest.raises(TypeError, match="pretend"):
        there.numpy()
    with pytest.raises(TypeError, match="pretend"):
        memoryview(there.__array__())
    here = there.cpu()
    here[0] = 5
    assert there.tolist() == [1, 1, 1]
    assert there.to(device) is there


def test_views_share_their_memory(device):
    whole = torch.zeros(4, 6, device=device)
    view = whole.T[1:3].view(2, 4)
    assert view.untyped_storage()._cdata == whole.untyped_storage()._cdata
    view[0] = 1
    whole.data[2:, 2] += 1
    assert whole[:, 1].tolist() == [1, 1, 1, 1]
    assert view.tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    kept = whole.detach()
    whole.set_(torch.ones(2, device=device))
    assert whole.tolist() == [1, 1]
    assert kept.shape == (4, 6)


def test_an_output_takes_its_shape(device):
    out = torch.empty(0, device=device)
    torch.cat([torch.ones(2, 3, device=device)] * 2, out=out)
    assert out.shape == (4, 3)
    assert out.sum().item() == 12
    assert out.untyped_storage().nbytes() == 48
    out.resize_(2, 2)
    assert out.tolist() == [[1, 1], [1, 1]]


def test_modules_live_on_it(device):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 5), nn.Tanh()).requires_grad_(False)
    ids = torch.tensor([[1, 2, 6]])
    expected = module(ids)
    module.to(device)
    assert {parameter.device for parameter in module.parameters()} == {device}
    assert torch.equal(module(ids.to(device)).cpu(), expected)
    with pytest.raises(RuntimeError, match="same device"):
        module(ids)


def test_inference_mode_changes_nothing(device):
    torch.manual_seed(0)
    module = nn.Linear(6, 5).to(device)
    given = torch.randn(2, 6, device=device)
    expected = module(given)
    with torch.inference_mode():
        result = module(given)
        assert given.T.is_inference() is False
        assert (result.T[0] + result[:, 0]).is_inference()
        result[0].mul_(1)
    assert result.is_inference()
    assert torch.equal(result, expected)


WAITS = {
    "copy to host": lambda there, _: there.cpu(),
    "copy to host by to": lambda there, _: there.to("cpu", torch.float16),
    "copy to host by copy": lambda there, here: here.copy_(there),
    "copy to host of a list": lambda there, _: there.tolist(),
    "copy to device": lambda there, here: here.to(there.device),
    "copy to device of a literal": lambda there, _: torch.tensor([1, 2], device=there.device),
    "copy to device of an index": lambda there, _: there[torch.tensor([1])],
    "value by item": lambda there, _: there[0, 0].item(),
    "value by float": lambda there, _: float(there.sum()),
    "value by bool": lambda there, _: bool(there.any()),
    "value by equal": lambda there, _: torch.equal(there, there),
    "size by mask": lambda there, _: there[there > 0],
    "size by nonzero": lambda there, _: there.nonzero(),
    "size by unique": lambda there, _: there.unique(),
    "size by repeats": lambda there, _: torch.repeat_interleave(there[0].int()),
    "size by a mask to write to": lambda there, _: there.__setitem__(there > 0, 1.0),
}


@pytest.mark.parametrize("name", WAITS)
def test_whatever_waits_for_the_device_is_counted(name, accelerator):
    here = torch.eye(3)
    there = here.to(accelerator.device)
    accelerator.waits.clear()
    WAITS[name](there, here)
    kind = name.partition(" by ")[0].partition(" of ")[0]
    assert accelerator.waited() == accelerator.waited(f"{kind} at test_device.py:") == 1


def test_what_does_not_wait_is_not_counted(accelerator):
    there = torch.eye(3, device=accelerator.device)
    accelerator.waits.clear()
    (there @ there).add_(1)[1:].sum().clone().to(torch.float64)
    there[torch.arange(2, device=there.device)] = 1
    there *= torch.tensor(2.0)
    torch.repeat_interleave(there, torch.ones(3, device=there.device).int(), 0, output_size=3)
    torch.zeros(3, device=there.device).copy_(torch.ones(3), non_blocking=True)
    assert accelerator.waited() == 0


def test_bytes_in_use_and_their_peak_are_known(accelerator):
    gc.collect()
    before = accelerator.memory_allocated()
    accelerator.reset_peak_memory_stats()
    first = torch.zeros(1000, device=accelerator.device)
    view = first[10:]
    assert accelerator.memory_allocated() == before + 4000
    del first
    assert accelerator.memory_allocated() == before + 4000
    view = view.double()
    assert accelerator.memory_allocated() == before + 7920
    assert accelerator.max_memory_allocated() == before + 4000 + 7920
    del view
    assert accelerator.memory_allocated() == before


def test_beyond_its_limit_it_is_out_of_memory(accelerator):
    held = torch.zeros(1000, device=accelerator.device)
    with accelerator.room_for(8000):
        assert accelerator.mem_get_info()[0] == 8000
        more = held + held
        with pytest.raises(torch.OutOfMemoryError, match="pretend"):
            torch.cat([held, more])
        in_its_place = held.add_(more)
        assert in_its_place is held
        other = torch.empty(1000, device=accelerator.device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(1).to(accelerator.device)
        del other
        assert torch.ones(1).to(accelerator.device).item() == 1


def test_a_forked_state_of_random_numbers_comes_back(device):
    torch.manual_seed(1)
    expected = torch.rand(3, device=device)
    torch.manual_seed(1)
    with torch.random.fork_rng():
        torch.rand(5, device=device)
    assert torch.equal(torch.rand(3, device=device), expected)


def test_torch_knows_of_it_only_while_it_is_used(accelerator):
    assert torch.accelerator.is_available()
    assert torch.get_device_module(accelerator.device) is accelerator
    accelerator.in_use = False
    assert not torch.accelerator.is_available()
