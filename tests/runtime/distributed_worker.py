"""One of two gloo ranks, started by test_distributed.py; each check asserts on every rank."""

import copy
import math
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fxamp.errors import OptionError, ScaleCollapseError
from fxamp.runtime.distributed import local, reduce_gradients_in
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.masters import master_of
from fxamp.runtime.scaler import LossScaler
from fxamp.runtime.snapshot import Snapshot


def agrees(tensor):
    """Whether all ranks hold the same bits."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.detach().contiguous())
    return all(torch.equal(everyone[0], other) for other in everyone)


def overflow_on_one_rank_only():
    """Sharded by hand: each rank owns other parameters, and one of them overflows."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.5)
    scaler = LossScaler(8.0, process_group=dist.group.WORLD)
    moves = []
    for bad_rank in (0, None, 1):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * (math.inf if dist.get_rank() == bad_rank else 1.0)).backward()
        result = scaler.step(optimizer, max_grad_norm=math.inf)
        scaler.update()
        moves.append(result.skipped)
        if bad_rank is None:
            # sqrt(4): two ranks of two ones each; each rank's sqrt(2) is rounded to float32 before it is squared.
            assert math.isclose(result.grad_norm, 2.0, rel_tol=2.0**-22), result.grad_norm
    assert moves == [True, False, True]
    assert (weight.tolist(), scaler.get_scale()) == ([0.5, 0.5], 2.0)


def written_after_unscale_on_one_rank():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], 0.5), LossScaler(8.0, process_group=dist.group.WORLD)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    if dist.get_rank() == 1:
        weight.grad.fill_(math.nan)
    assert scaler.step(optimizer).skipped and weight.item() == 1.0


def rank_without_gradients():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], 0.5), LossScaler(8.0, process_group=dist.group.WORLD)
    loss = scaler.scale(weight.sum() * math.nan)
    if dist.get_rank() == 0:
        loss.backward()
    result = scaler.step(optimizer)
    scaler.update()
    assert result.skipped and weight.item() == 1.0 and scaler.get_scale() == 4.0


def collapse_on_all_ranks():
    """The NaN is on rank 0; all ranks see the floor, so none waits for another."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.5)
    scaler = LossScaler(2.0**-14, max_skips=2, process_group=dist.group.WORLD)
    raised = 0
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * (math.nan if dist.get_rank() == 0 else 1.0)).backward()
        scaler.step(optimizer)
        try:
            scaler.update()
        except ScaleCollapseError:
            raised += 1
    assert raised == 2
    assert agrees(weight)


def data_parallel(dtype, reduce_dtype):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if dtype != torch.float32:
        optimizer = MasterWeightOptimizer(optimizer, bucket_bytes=64)
    ddp, scaler = DistributedDataParallel(model), LossScaler(16.0)
    if reduce_dtype is not None:
        reduce_gradients_in(ddp, reduce_dtype)
    torch.manual_seed(10 + dist.get_rank())
    for number in range(4):
        optimizer.zero_grad()
        inputs = torch.randn(3, 4) * (math.nan if (number, dist.get_rank()) == (2, 1) else 1.0)
        scaler.scale(ddp(inputs.to(dtype)).float().square().mean()).backward()
        result = scaler.step(optimizer, max_grad_norm=1.0)
        scaler.update()
        assert result.skipped == (number == 2)
    for parameter in model.parameters():
        assert parameter.isfinite().all() and agrees(parameter)
        if dtype != torch.float32:
            assert agrees(master_of(parameter))
    assert scaler.get_scale() == 8.0


def sums_are_exact_where_asked():
    """(1 + 513) / 2 = 257 is no bfloat16: only a sum in float32 gives it."""
    sums = {}
    for reduce_dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Linear(1, 1, bias=False)
        ddp = DistributedDataParallel(weight)
        reduce_gradients_in(ddp, reduce_dtype)
        ddp(torch.tensor([[513.0 if dist.get_rank() else 1.0]])).sum().backward()
        sums[reduce_dtype] = weight.weight.grad.item()
    assert sums == {torch.float32: 257.0, torch.bfloat16: 256.0}, sums


def converted_under_data_parallel():
    import fxamp

    results = []
    for convert_first in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        if convert_first:
            ddp = DistributedDataParallel(fxamp.convert(model, dtype=torch.bfloat16))
        else:
            ddp = DistributedDataParallel(model)
            ddp.module = fxamp.convert(ddp.module, dtype=torch.bfloat16)
        optimizer, scaler = torch.optim.SGD(ddp.parameters(), 0.1), LossScaler()
        torch.manual_seed(3 + dist.get_rank())
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(ddp(torch.randn(4, 8)).float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert all(agrees(parameter) for parameter in ddp.parameters())
        results.append([parameter.detach().clone() for parameter in ddp.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


class Checkpoints(torch.nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.middle, self.last = (torch.nn.Linear(8, 8) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        h = self.first(x).relu()
        return self.last(checkpoint(lambda h: self.middle(h).relu(), h, use_reentrant=self.use_reentrant))


def checkpoints_under_data_parallel(use_reentrant):
    """Gradients are those of the whole batch in one process, on all ranks."""
    import fxamp

    torch.manual_seed(0)
    model = Checkpoints(use_reentrant)
    whole = fxamp.convert(copy.deepcopy(model), dtype=torch.bfloat16)
    ddp = DistributedDataParallel(fxamp.convert(model, dtype=torch.bfloat16))
    batches = [torch.randn(4, 8).requires_grad_() for _ in range(dist.get_world_size())]
    ddp(batches[dist.get_rank()]).square().sum().backward()
    for batch in batches:
        (whole(batch).square().sum() / len(batches)).backward()
    for one, other in zip(ddp.parameters(), whole.parameters(), strict=True):
        assert agrees(one.grad)
        torch.testing.assert_close(one.grad, other.grad, rtol=2**-7, atol=0.02)


def lowered_from_different_seeds(synchronise, holds_first):
    """O2, each rank with its own initial weights: what makes the parameters equal makes the masters equal."""
    import fxamp

    torch.manual_seed(dist.get_rank())
    net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    model = fxamp.convert(net, torch.bfloat16, (torch.ones(2, 8),), opt_level="O2")
    run, optimizer = model, None
    if holds_first:
        optimizer = MasterWeightOptimizer(torch.optim.AdamW(model.parameters(), 2.0**-10))
    if synchronise == "ddp":
        run = DistributedDataParallel(model)
    else:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
    optimizer = optimizer or MasterWeightOptimizer(torch.optim.AdamW(model.parameters(), 2.0**-10))
    if synchronise == "resync_masters":
        optimizer.resync_masters()
    assert all(agrees(value) for value in model.state_dict().values())
    for number in range(5):
        torch.manual_seed(2 * number + dist.get_rank())
        optimizer.zero_grad()
        run(torch.randn(8, 8)).square().mean().backward()
        if run is model:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
    assert all(agrees(value) for value in model.state_dict().values())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in model.state_dict().values())


def lowered_and_loaded():
    """Between a load and the first step nobody wrote: the loaded numbers are exact, with several ranks too."""
    import fxamp

    torch.manual_seed(dist.get_rank())
    module = torch.nn.ModuleDict({"net": torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh())})
    module["net"] = fxamp.convert(module["net"], torch.bfloat16, (torch.ones(2, 8),), opt_level="O2")
    exact = {name: torch.full_like(value, 1.0 + 2.0**-12) for name, value in module.state_dict().items()}
    module.load_state_dict(exact)
    optimizer = MasterWeightOptimizer(torch.optim.SGD(module.parameters(), 0.1))
    assert all(torch.equal(value, exact[name]) for name, value in module.state_dict().items())
    saved = copy.deepcopy(optimizer.state_dict())
    DistributedDataParallel(module["net"])  # writes
    assert all(bool((value == 1.0).all()) for value in module.state_dict().values())
    optimizer.load_state_dict(saved)
    assert all(torch.equal(value, exact[name]) for name, value in module.state_dict().items())
    with torch.no_grad():
        module["net"][0].bias.clamp_(max=5.0)
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        module["net"][0].bias.clamp_(max=5.0)  # after a step: one more writer, whose writes are single elements
        assert master_of(module["net"][0].weight)[0, 0] == 1.0 + 2.0**-12
    assert all(agrees(value) for value in module.state_dict().values())


def fully_sharded(make, dtype):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))).to(dtype)
    reference = [parameter.detach().float().clone() for parameter in model.parameters()]
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = make(model.parameters())
    if dtype != torch.float32:
        optimizer = MasterWeightOptimizer(optimizer)
    scaler = LossScaler(4.0)
    inputs = torch.ones(2, 4, dtype=dtype)
    for number in range(4):
        optimizer.zero_grad()
        # Rank 1's last layer only holds its own shard of the overflow.
        factor = math.inf if number in (0, 2) and dist.get_rank() == 1 else 1.0
        scaler.scale(model(inputs).float().mean() * factor).backward()
        result = scaler.step(optimizer, max_grad_norm=0.01)
        scaler.update()
        assert result.skipped == (number in (0, 2))
    assert scaler.get_scale() == 1.0
    if dtype == torch.float32:
        expected = clipped_in_one_process(reference, make)
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            # Sums over two shards instead of one: some roundings of float32.
            torch.testing.assert_close(parameter.full_tensor(), wanted, rtol=2**-18, atol=2**-20)


def lowered_and_sharded_at_the_root(holds_first):
    """O2 under fully_shard, which exchanges the parameters: states are float32, and a loaded one reaches masters."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    import fxamp

    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    exact = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
    model = fxamp.convert(plain, torch.bfloat16, opt_level="O2", example_inputs=(torch.ones(4, 8),))
    fully_shard(model)
    whole = StateDictOptions(full_state_dict=True)
    if holds_first:
        optimizer = MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 2.0**-10))
    set_model_state_dict(model, dict(exact), options=whole)
    if not holds_first:
        optimizer = MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 2.0**-10))
    for number in range(3):
        masters = [master.full_tensor() for master in optimizer.master_params()]
        for name, value, parameter, master in zip(exact, exact.values(), model.parameters(), masters, strict=True):
            assert parameter.dtype == torch.bfloat16 and torch.equal(parameter.full_tensor(), master.bfloat16()), name
            assert torch.equal(master, value), (name, number)
        for state in (model.state_dict(), get_model_state_dict(model)):
            assert all(torch.equal(value.full_tensor(), exact[name]) for name, value in state.items()), number
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        gradients = [parameter.grad.full_tensor().float() for parameter in model.parameters()]
        optimizer.step()
        exact = {
            name: value - 2.0**-10 * gradient for (name, value), gradient in zip(exact.items(), gradients, strict=True)
        }
    model.to("cpu")  # exchanges the numbers of the parameters, and their attributes
    before = copy.deepcopy(exact)
    assert all(torch.equal(value.full_tensor(), before[name]) for name, value in model.state_dict().items())
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    assert all(torch.equal(value.full_tensor(), before[name]) for name, value in model.state_dict().items())


def stochastic_of_shards():
    """Random rounding of shards: each number becomes one of its two neighbours, and their mean is right."""
    model = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    fully_shard(model)
    optimizer = MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 1.0), masters="stochastic")
    model.weight.grad = torch.full_like(model.weight, -(2.0**-9))
    optimizer.step()
    weight = model.weight.full_tensor()
    assert set(weight.unique().tolist()) == {1.0, 1.0 + 2.0**-7}
    # A quarter of 4,096 go up: within five standard deviations, 0.0068 each.
    assert abs(float((weight > 1).float().mean()) - 0.25) < 5 * 0.0068


def norm_of_gradients(scaler):
    """Sharded, replicated, sharded over one of two mesh dimensions, addends, plain: each part counts once."""
    line, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    values = [torch.tensor([3.0, 0.0, 0.0, 4.0]), torch.tensor([1.0, 2.0]), torch.tensor([6.0, 8.0])]
    placed = [(line, [Shard(0)]), (line, [Replicate()]), (square, [Replicate(), Shard(0)])]
    weights = [
        torch.nn.Parameter(distribute_tensor(torch.zeros_like(v), *at)) for v, at in zip(values, placed, strict=True)
    ]
    weights.append(torch.nn.Parameter(torch.zeros(1)))  # on every rank alike
    weights.append(torch.nn.Parameter(distribute_tensor(torch.zeros(2), line, [Replicate()])))
    optimizer = torch.optim.SGD(weights, 1.0, foreach=False)
    scale = scaler.get_scale() if scaler.is_enabled() else 1.0
    scaler.scale(torch.zeros(()))
    for weight, value, at in zip(weights, values, placed, strict=False):
        weight.grad = distribute_tensor(value * scale, *at)
    weights[3].grad = torch.tensor([2.0]) * scale
    weights[4].grad = DTensor.from_local(torch.tensor([2.0, 1.5]) * scale, line, [Partial()])
    everything = torch.cat([*values, torch.tensor([2.0, 4.0, 3.0])])
    result = scaler.step(optimizer, max_grad_norm=1.0)
    assert math.isclose(result.grad_norm, float(everything.norm()), rel_tol=1e-6), result.grad_norm
    clipped = everything / everything.norm()
    found = [weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad for weight in weights]
    torch.testing.assert_close(torch.cat([found[0], found[1], found[2], found[3], found[4]]), clipped)


def norm_of_two_dimensions():
    """HSDP: replicas of shards, here on a mesh of 2 x 1, as torch's clip_grad_norm_ has it."""
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1.0), LossScaler()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    result = scaler.step(optimizer, max_grad_norm=math.inf)
    assert result.grad_norm == 2.0, result.grad_norm


def norm_asked_later():
    weight = torch.nn.Parameter(distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (2,)), [Shard(0)]))
    plain = torch.nn.Parameter(torch.zeros(2))
    for parameter, scaler in ((weight, LossScaler()), (plain, LossScaler(process_group=dist.group.WORLD))):
        optimizer = torch.optim.SGD([parameter], 1.0)
        scaler.scale(torch.zeros(()))
        parameter.grad = torch.ones_like(parameter)
        result = scaler.step(optimizer)
        try:
            raise AssertionError(f"a norm of one rank's part: {result.grad_norm}")
        except OptionError as error:
            assert "max_grad_norm=math.inf" in str(error)


def sharded_weight_without_gradient():
    """On one rank alone: it takes part in what the others add up."""
    weight = torch.nn.Parameter(distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (2,)), [Shard(0)]))
    optimizer, scaler = torch.optim.SGD([weight], 1.0), LossScaler(8.0)
    scaler.scale(torch.zeros(()))
    if dist.get_rank() == 0:
        weight.grad = torch.full_like(weight, 24.0)
    result = scaler.step(optimizer, max_grad_norm=math.inf)
    assert (result.skipped, result.grad_norm) == (False, 3.0)


def undone_where_sharded(flag):
    """Shards, and the state of shards, as an unfused optimizer keeps them on the device of the flag or on the host."""
    mesh = init_device_mesh("cpu", (2,))
    weights = [torch.nn.Parameter(distribute_tensor(torch.ones(4, n), mesh, [Shard(0)])) for n in (2, 3)]
    optimizer = torch.optim.AdamW(weights, 0.1, foreach=True, amsgrad=True)
    for gradient in (1.0, math.nan):
        expected = copy.deepcopy([(weight.detach(), optimizer.state[weight]) for weight in weights])
        for weight in weights:
            weight.grad = torch.full_like(weight, gradient)
        before = Snapshot(optimizer, flag)
        optimizer.step()
        before.select_back(torch.tensor(float(math.isnan(gradient))))
        if math.isnan(gradient):
            for undo in before.host_changes():
                undo()
    for weight, (value, state) in zip(weights, expected, strict=True):
        found, kept = {"": weight, **optimizer.state[weight]}, {"": value, **state}
        assert found.keys() == kept.keys() and isinstance(found["exp_avg"], DTensor)
        assert all(torch.equal(local(found[key]), local(kept[key])) for key in kept)


def clipped_in_one_process(values, make):
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)
    optimizer = make(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    return list(model.parameters())


class Blocks(torch.nn.Module):
    """A stem, three blocks and a head; `ties` reads a weight of a block outside of it."""

    def __init__(self, ties=False):
        super().__init__()
        self.stem = torch.nn.Linear(8, 16)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)) for _ in range(3)
        )
        self.head = torch.nn.Linear(16, 8)
        self.ties = ties

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        if self.ties:
            x = torch.nn.functional.linear(x, self.blocks[0][0].weight[:16])
        return self.head(x)


def converted_blocks_fully_sharded(at_root):
    """Converted block by block, sharded unit by unit: as one process in mixed precision, within float32's rounding."""
    import fxamp

    runs = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = fxamp.convert(Blocks(), torch.bfloat16, boundaries="blocks")
        if sharded:
            for block in model.blocks:
                fully_shard(block)
            if at_root:
                fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        torch.manual_seed(5)
        inputs = torch.randn(4, 8)
        for _ in range(4):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        report = fxamp.report(model)
        assert report.captures == ("symbolic",) * 2 and len(report.gemms) == 4, report.captures
        assert all(row.precision == "low" for row in report.rows if row.op == "linear"), report
        runs.append([getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()])
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-12, atol=2**-14)


def sharded_weight_outside_of_its_unit():
    import fxamp

    model = fxamp.convert(Blocks(ties=True), torch.bfloat16, boundaries="blocks")
    for block in model.blocks:
        fully_shard(block)
    try:
        model(torch.randn(4, 8))
    except fxamp.ShardedParameterError as error:
        assert "blocks.0.0.weight is sharded" in str(error) and "boundaries=" in str(error), error
    else:
        raise AssertionError("no error")


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.5, momentum=0.9)


def fused_adam(parameters):
    return torch.optim.Adam(parameters, 0.01, fused=True)


class Gathers(torch.nn.Module):
    """Compares what all ranks have, as contrastive models do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 3 - 1 + number % 2)

    def forward(self, x):
        here = self.first(x)
        return self.last(torch.cat(all_gather(here))) @ here.t()


def gathered_in_forward():
    """Small whole numbers are what bfloat16 holds exactly."""
    from fxamp import convert

    plain, results = Gathers(), []
    x = torch.eye(8)[:2] + dist.get_rank()
    converted = convert(Gathers(), dtype=torch.bfloat16, capture="symbolic")
    for model in (plain, converted):
        output = model(x)
        output.sum().backward()
        results.append([output.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *results)), results


CHECKS = {
    "gathered": gathered_in_forward,
    "overflow": overflow_on_one_rank_only,
    "written": written_after_unscale_on_one_rank,
    "empty": rank_without_gradients,
    "collapse": collapse_on_all_ranks,
    "ddp": lambda: data_parallel(torch.float32, None),
    "ddp_low_traffic": lambda: data_parallel(torch.float32, torch.float16),
    "ddp_masters": lambda: data_parallel(torch.bfloat16, None),
    "ddp_masters_exact": lambda: data_parallel(torch.bfloat16, torch.float32),
    "exact": sums_are_exact_where_asked,
    "converted": converted_under_data_parallel,
    "o2_seeds": lambda: lowered_from_different_seeds("ddp", holds_first=False),
    "o2_seeds_optimizer_first": lambda: lowered_from_different_seeds("ddp", holds_first=True),
    "o2_seeds_by_hand": lambda: lowered_from_different_seeds("resync_masters", holds_first=False),
    "o2_seeds_by_hand_later": lambda: lowered_from_different_seeds("resync_masters", holds_first=True),
    "o2_loaded": lowered_and_loaded,
    "o2_fsdp": lambda: lowered_and_sharded_at_the_root(holds_first=False),
    "o2_fsdp_optimizer_first": lambda: lowered_and_sharded_at_the_root(holds_first=True),
    "fsdp_stochastic": stochastic_of_shards,
    "fsdp": lambda: fully_sharded(momentum, torch.float32),
    "fsdp_fused": lambda: fully_sharded(fused_adam, torch.float32),
    "fsdp_masters": lambda: fully_sharded(momentum, torch.bfloat16),
    "fsdp_blocks": lambda: converted_blocks_fully_sharded(at_root=False),
    "fsdp_blocks_and_root": lambda: converted_blocks_fully_sharded(at_root=True),
    "checkpoints": lambda: checkpoints_under_data_parallel(use_reentrant=False),
    "checkpoints_reentrant": lambda: checkpoints_under_data_parallel(use_reentrant=True),
    "fsdp_outside": sharded_weight_outside_of_its_unit,
    "norm": lambda: norm_of_gradients(LossScaler(16.0)),
    "norm_unscaled": lambda: norm_of_gradients(LossScaler(dtype=torch.bfloat16)),
    "norm_two_dimensions": norm_of_two_dimensions,
    "norm_asked_later": norm_asked_later,
    "norm_one_rank_without": sharded_weight_without_gradient,
    "undone_on_device": lambda: undone_where_sharded(torch.device("cpu")),
    "undone_on_host": lambda: undone_where_sharded(torch.device("cuda")),
    "fsdp_fused_masters": lambda: fully_sharded(fused_adam, torch.bfloat16),
}


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, check in CHECKS.items():
        try:
            check()
            outcome = "ok"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        line = f"rank {dist.get_rank()} {name}: {outcome}".replace("\n", " ")
        sys.stdout.write(line + "\n")  # one write a line: both ranks share the pipe
        sys.stdout.flush()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
