"""What a parameter costs beyond one machine: bytes of memory, and bytes between ranks, by way to train: `tools/ranks`.

Really run: memory in one process, traffic between gloo ranks on the CPU, of a model whose parameters are nearly all
weights of GEMMs. Payloads count what enters a collective; the wire carries (n - 1) / n of a gather or a scatter to and
from each of n ranks, and twice that of an all-reduce.
"""

import argparse
import functools
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from fxamp.convert import convert
from fxamp.counting import results
from fxamp.counting.scale import tensor_changes
from fxamp.runtime.distributed import reduce_gradients_in
from fxamp.runtime.master_weights import MasterWeightOptimizer

LOW = torch.bfloat16
WIDTH, DEPTH = 256, 8
STEPS = 2
_NBYTES = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2}

Trained = tuple[nn.Module, torch.optim.Optimizer]
MakeOptimizer = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD, momentum": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9, foreach=False),
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-3, foreach=False),
}


def _plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def _example() -> torch.Tensor:
    return torch.ones(2, WIDTH)


def _converted(model: nn.Module, opt_level: str) -> nn.Module:
    return convert(model, LOW, example_inputs=(_example(),), opt_level=opt_level)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(_example()).float().square().mean().backward()
    optimizer.step()


# ------------------------------------------------------------------------------------------------------ memory


def _o2(make: MakeOptimizer, masters: str) -> Trained:
    model = _converted(_plain(), "O2")
    return model, MasterWeightOptimizer(make(model.parameters()), masters=masters)


def _of(model: nn.Module, make: MakeOptimizer) -> Trained:
    return model, make(model.parameters())


MEMORY: dict[str, Callable[[MakeOptimizer], Trained]] = {
    "fp32, or autocast": lambda make: _of(_plain(), make),
    "O1": lambda make: _of(_converted(_plain(), "O1"), make),
    "O2, fp32 masters": lambda make: _o2(make, "fp32"),
    'O2, masters="kahan"': lambda make: _o2(make, "kahan"),
    'O2, masters="stochastic"': lambda make: _o2(make, "stochastic"),
    "O3": lambda make: _of(_converted(_plain(), "O3"), make),
}


def memory() -> dict[str, dict[str, float]]:
    """Bytes of tensors a parameter keeps after a step (weight, gradient, masters, optimizer): way -> optimizer."""
    count = sum(parameter.numel() for parameter in _plain().parameters())
    found: dict[str, dict[str, float]] = {}
    for way, build in MEMORY.items():
        for name, make in OPTIMIZERS.items():
            kept: list[Trained] = []

            def run(build: Any = build, make: Any = make, kept: list[Trained] = kept) -> None:
                kept.append(build(make))
                for _ in range(STEPS):
                    _train(*kept[0])

            run()  # what is loaded and cached once
            kept.clear()
            gc.collect()  # what dies while it is counted would count as less than nothing
            found.setdefault(way, {})[name] = sum(tensor_changes(run)) / count
    return found


# ----------------------------------------------------------------------------------------------------- traffic


def _replicated(opt_level: str, reduce_dtype: torch.dtype | None = None) -> Trained:
    model = _converted(_plain(), opt_level)
    ddp = DistributedDataParallel(model)
    if reduce_dtype is not None:
        reduce_gradients_in(ddp, reduce_dtype)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(ddp.parameters())
    return ddp, MasterWeightOptimizer(optimizer) if opt_level == "O2" else optimizer


def _sharded(**policy: Any) -> Trained:
    """Every layer converted and sharded by itself."""
    model = _plain()
    for number, block in enumerate(model):
        model[number] = _converted(block, "O1")
        fully_shard(model[number], mp_policy=MixedPrecisionPolicy(**policy))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(**policy))
    return model, torch.optim.AdamW(model.parameters())


TRAFFIC: dict[str, Callable[[], Trained]] = {
    "DDP, O1": lambda: _replicated("O1"),
    "DDP, O1, reduce_gradients_in(bfloat16)": lambda: _replicated("O1", torch.bfloat16),
    "DDP, O2": lambda: _replicated("O2"),
    "DDP, O2, reduce_gradients_in(float32)": lambda: _replicated("O2", torch.float32),
    "FSDP2, O1 by block": _sharded,
    "FSDP2, O1 by block, reduce_dtype=bfloat16": lambda: _sharded(reduce_dtype=LOW),
    "FSDP2, O1 by block, param_dtype=bfloat16": lambda: _sharded(param_dtype=LOW, reduce_dtype=torch.float32),
    "FSDP2, O1 by block, both": lambda: _sharded(param_dtype=LOW, reduce_dtype=LOW),
}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter")


def traffic(ranks: int = 2) -> dict[str, dict[str, float]]:
    """Bytes a parameter that enter each collective in one step, and calls: way -> collective."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ranks.pt")
        multiprocessing.spawn(_rank, (ranks, folder, path), nprocs=ranks)  # type: ignore[attr-defined, no-untyped-call, unused-ignore]
        found: dict[str, dict[str, float]] = torch.load(path)
    return found


def _rank(rank: int, ranks: int, folder: str, path: str) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    found = {way: _one_step(build) for way, build in TRAFFIC.items()}
    if rank == 0:
        torch.save(found, path)
    dist.barrier()
    dist.destroy_process_group()


def _one_step(build: Callable[[], Trained]) -> dict[str, float]:
    model, optimizer = build()
    count = sum(parameter.numel() for parameter in model.parameters())
    for _ in range(STEPS):
        _train(model, optimizer)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        _train(model, optimizer)
    payloads = dict.fromkeys((*COLLECTIVES, "calls"), 0.0)
    events = [(event.name(), event.shapes(), event.dtypes()) for event in recorded.profiler.kineto_results.events()]
    is_sharded = any(name == "c10d::_reduce_scatter_base_" for name, _, _ in events)
    for name, shapes, dtypes in events:
        collective, position = _COUNTED.get(name, ("", 0))
        if not collective or (is_sharded and collective == "all-reduce"):  # gloo scatters by reducing everything
            continue
        elements = functools.reduce(lambda a, b: a * b, shapes[position], 1)
        payloads[collective] += elements * _NBYTES.get(dtypes[position], 4) / count
        payloads["calls"] += 1
    return payloads


# Event of the profiler -> its collective, and which argument is the whole of the data.
_COUNTED = {
    "gloo:all_reduce": ("all-reduce", 0),
    "c10d::_allgather_base_": ("all-gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
}


def per_rank(payloads: dict[str, float], ranks: int) -> float:
    """Bytes a parameter that each of `ranks` sends in a step, with ring collectives."""
    share = (ranks - 1) / ranks
    return share * (2 * payloads["all-reduce"] + payloads["all-gather"] + payloads["reduce-scatter"])


# ------------------------------------------------------------------------------------------------------ tables


def memory_table(data: dict[str, Any]) -> str:
    """Bytes a parameter."""
    rows = [[way, *(f"{value:.2f}" for value in row.values())] for way, row in data["memory"].items()]
    return results.as_table(rows, ("bytes a parameter after a step", *OPTIMIZERS))


def traffic_table(data: dict[str, Any]) -> str:
    """Bytes a parameter and a step, and what they come to on the wire."""
    rows = [
        [way, *(f"{row[name]:.2f}" for name in COLLECTIVES), f"{row['calls']:.0f}",
         *(f"{per_rank(row, ranks):.2f}" for ranks in (2, 8, 64))]
        for way, row in data["traffic"].items()
    ]  # fmt: skip
    heads = (f"payload, bytes a parameter ({data['ranks']} ranks)", *COLLECTIVES, "calls")
    return results.as_table(rows, (*heads, *(f"each of {ranks} sends" for ranks in (2, 8, 64))))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="ranks", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="gloo processes; default 2")
    results.add_save(parser, "ranks")
    typed = list(sys.argv[1:] if arguments is None else arguments)
    given = parser.parse_args(typed)
    start = time.perf_counter()
    data = {"ranks": given.ranks, "memory": memory(), "traffic": traffic(given.ranks)}
    if given.save:
        results.save(results.make("tools/ranks", typed, data, time.perf_counter() - start), Path(given.save))
    print(f"{memory_table(data)}\n\n{traffic_table(data)}")
