"""One file, atomic; a killed process leaves the last good one, and the resumed run ends bit-equal."""

import argparse
import copy
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time

import numpy
import pytest
import torch
from checkpoint_trainer import die_while_saving, train
from torch.utils._pytree import tree_flatten

import fxamp
from fxamp.errors import CheckpointError, OptionError
from fxamp.runtime.checkpoint import load_checkpoint, save_checkpoint
from fxamp.runtime.fixed_scalers import StaticLossScaler
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.scaler import LossScaler

SERVER = multiprocessing.get_context("forkserver")  # imports torch once, then starts processes quickly
SERVER.set_forkserver_preload(["checkpoint_trainer"])


def run_trainer(path, steps, kill_after=None):
    """Train to `steps`; killed `kill_after` seconds after there is a checkpoint, if given. True if it ended."""
    saved = SERVER.Event()
    process = SERVER.Process(target=train, args=(str(path), steps, saved))
    process.start()
    if kill_after is not None:
        assert saved.wait(60)
        time.sleep(kill_after)
        process.kill()
    process.join()
    return process.exitcode == 0


def assert_equal(one, other):
    """Bit for bit, in every tensor and every number of two trees."""
    (leaves, structure), (others, other_structure) = tree_flatten(one), tree_flatten(other)
    assert structure == other_structure
    for leaf, wanted in zip(leaves, others, strict=True):
        assert torch.equal(leaf, wanted) if isinstance(leaf, torch.Tensor) else leaf == wanted


def test_killed_at_random_moments_the_run_ends_bit_equal(tmp_path):
    steps = 12
    assert run_trainer(tmp_path / "whole.pt", steps)
    killed = 0
    for delay in (0.0, 0.003, 0.011):
        killed += not run_trainer(tmp_path / "broken.pt", steps, kill_after=delay)
        assert 0 < load_checkpoint(tmp_path / "broken.pt")["step"] <= steps
    assert killed >= 1
    assert run_trainer(tmp_path / "broken.pt", steps)
    whole, broken = (torch.load(tmp_path / name) for name in ("whole.pt", "broken.pt"))
    assert_equal(broken, whole)
    assert sorted(os.listdir(tmp_path)) == ["broken.pt", "whole.pt"]


def test_killed_in_the_middle_of_writing_leaves_the_last_good_one(tmp_path):
    process = SERVER.Process(target=die_while_saving, args=(str(tmp_path / "a.pt"),))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert load_checkpoint(tmp_path / "a.pt") == {"step": 1}
    assert len(os.listdir(tmp_path)) == 2
    save_checkpoint(tmp_path / "a.pt", step=3)
    assert os.listdir(tmp_path) == ["a.pt"]


def pieces(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.Adam(model.parameters()), LossScaler()


def test_round_trip_of_all_parts(tmp_path):
    model, optimizer, scaler = pieces(0)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update(8.0)
    save_checkpoint(tmp_path / "a.pt", model=model, optimizer=optimizer, scaler=scaler, epoch=3, best=0.5)
    expected = torch.rand(3)
    other = pieces(1)
    extra = load_checkpoint(tmp_path / "a.pt", model=other[0], optimizer=other[1], scaler=other[2])
    assert extra == {"epoch": 3, "best": 0.5}
    assert torch.equal(torch.rand(3), expected)
    torch.testing.assert_close(other[0].state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(other[1].state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    assert other[2].state_dict() == scaler.state_dict()


def test_pythons_and_numpys_numbers_go_on_too(tmp_path):
    save_checkpoint(tmp_path / "a.pt")
    expected = random.random(), random.gauss(0, 1), numpy.random.rand(3).tolist(), numpy.random.normal()
    random.seed(7)
    numpy.random.seed(7)
    load_checkpoint(tmp_path / "a.pt")
    assert expected == (random.random(), random.gauss(0, 1), numpy.random.rand(3).tolist(), numpy.random.normal())


def test_random_state_may_be_left_alone(tmp_path):
    save_checkpoint(tmp_path / "a.pt")
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    load_checkpoint(tmp_path / "a.pt", restores_random=False)
    assert torch.equal(torch.rand(1), expected)


def test_torchs_scaler_is_taken_too(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    save_checkpoint(tmp_path / "a.pt", scaler=scaler)
    ours = LossScaler()
    load_checkpoint(tmp_path / "a.pt", scaler=ours)
    assert ours.get_scale() == 4.0


def test_plain_float32_weights_load(tmp_path):
    model = pieces(0)[0]
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    other = pieces(1)[0]
    load_checkpoint(tmp_path / "plain.pt", model=other)
    assert torch.equal(other.weight, model.weight)


def test_plain_optimizer_state_loads_under_masters(tmp_path):
    model, optimizer, _ = pieces(0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "a.pt", optimizer=optimizer)
    low = pieces(1)[0].bfloat16()
    masters = MasterWeightOptimizer(torch.optim.Adam(low.parameters()))
    load_checkpoint(tmp_path / "a.pt", optimizer=masters)
    assert torch.equal(masters.state[low.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path):
    model, optimizer, scaler = pieces(0)
    save_checkpoint(tmp_path / "last.pt", model=model)
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=r"lats\.pt does not exist.*Did you mean 'last\.pt'"):
        load_checkpoint(tmp_path / "lats.pt")
    with pytest.raises(CheckpointError, match=r"no state for \['scaler'\]; it has \['model'\]"):
        load_checkpoint(tmp_path / "last.pt", model=model, scaler=scaler)
    with pytest.raises(CheckpointError, match=r"missing \['0\.bias', .*unexpected \['bias', 'weight'\]"):
        load_checkpoint(tmp_path / "last.pt", model=torch.nn.Sequential(model))
    with pytest.raises(CheckpointError, match=r"bias is \(2,\) in the file, \(3,\) in the model"):
        load_checkpoint(tmp_path / "last.pt", model=torch.nn.Linear(2, 3))
    (tmp_path / "broken.pt").write_bytes((tmp_path / "last.pt").read_bytes()[:500])
    with pytest.raises(CheckpointError, match=r"broken\.pt cannot be read"):
        load_checkpoint(tmp_path / "broken.pt", model=model)
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="holds a list"):
        load_checkpoint(tmp_path / "list.pt")
    torch.save({"weights": 1}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"not written by fxamp.*'weights'"):
        load_checkpoint(tmp_path / "other.pt", optimizer=optimizer)
    with pytest.raises(CheckpointError, match=r"nowhere is not a directory"):
        save_checkpoint(tmp_path / "nowhere" / "a.pt")
    assert torch.equal(model.weight, before)


def trained(seed):
    """Pieces that have a state of their own in every part."""
    model, optimizer, scaler = pieces(seed)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update(8.0 + seed)
    return model, optimizer, scaler


class Counted(torch.nn.Linear):
    """Takes its weights before it refuses a state."""

    def get_extra_state(self):
        return 1

    def set_extra_state(self, state):
        if state != 1:
            raise ValueError(f"extra state {state!r}")


@pytest.mark.parametrize("culprit", ["model", "optimizer", "scaler", "random state"])
def test_a_part_that_does_not_fit_changes_no_other(tmp_path, culprit):
    _, optimizer, scaler = trained(0)
    counted = Counted(2, 2)
    save_checkpoint(tmp_path / "a.pt", model=counted, optimizer=optimizer, scaler=scaler)
    content = torch.load(tmp_path / "a.pt")
    content["model"]["_extra_state"] = 1 if culprit != "model" else 2
    if culprit == "random state":
        content["random"]["cpu"] = torch.zeros(3, dtype=torch.uint8)
    if culprit == "optimizer":
        content["optimizer"]["param_groups"][0]["params"] = [0]
    torch.save(content, tmp_path / "a.pt")
    _, others, dynamic = trained(1)
    ours = Counted(2, 2)
    for group, parameters in zip(others.param_groups, [list(ours.parameters())], strict=True):
        others.state = {new: others.state[old] for old, new in zip(group["params"], parameters, strict=True)}
        group["params"] = parameters
    scalers = StaticLossScaler(4.0) if culprit == "scaler" else dynamic
    before = [copy.deepcopy(part.state_dict()) for part in (ours, others, scalers)]
    random = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=rf"the {culprit} of .*a\.pt does not fit.*Nothing was changed"):
        load_checkpoint(tmp_path / "a.pt", model=ours, optimizer=others, scaler=scalers)
    assert_equal([part.state_dict() for part in (ours, others, scalers)], before)
    assert torch.equal(torch.get_rng_state(), random)
    assert others.param_groups[0]["params"][0] is ours.weight


@pytest.mark.parametrize("saved, asked", [("Adam", "SGD"), ("SGD", "Adam"), ("RMSprop", "Adagrad")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_of_another_optimizer_does_not_fit(tmp_path, saved, asked, dtype):
    def made(name):
        model = torch.nn.Linear(2, 2).to(dtype)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        optimizer = optimizer if dtype == torch.float32 else MasterWeightOptimizer(optimizer)
        model(torch.ones(1, 2, dtype=dtype)).sum().backward()
        optimizer.step()
        return optimizer

    save_checkpoint(tmp_path / "a.pt", optimizer=made(saved))
    optimizer = made(asked)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError, match=r"has no .*: the state is another optimizer's\. Nothing was changed"):
        load_checkpoint(tmp_path / "a.pt", optimizer=optimizer)
    assert_equal(optimizer.state_dict(), before)
    if isinstance(optimizer, MasterWeightOptimizer):
        with pytest.raises(OptionError, match="another optimizer's"):
            optimizer.load_state_dict(made(saved).state_dict())
        assert_equal(optimizer.state_dict(), before)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_from_before_there_was_a_scheduler_fits(tmp_path, dtype):
    def made():
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).to(dtype).parameters(), lr=0.1)
        return optimizer if dtype == torch.float32 else MasterWeightOptimizer(optimizer)

    save_checkpoint(tmp_path / "a.pt", optimizer=made())
    optimizer = made()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # gives its groups an initial_lr
    load_checkpoint(tmp_path / "a.pt", optimizer=optimizer)


@pytest.mark.parametrize("masters", ["fp32", "kahan"])
def test_what_masters_hold_survives_a_checkpoint_that_does_not_fit(tmp_path, masters):
    def low(seed, opt_level):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
        options = {"dtype": torch.bfloat16, "opt_level": opt_level, "example_inputs": (torch.ones(2, 8),)}
        model = fxamp.convert(model, **options) if opt_level else model.bfloat16()
        optimizer = MasterWeightOptimizer(torch.optim.Adam(model.parameters(), lr=1e-4), masters=masters)
        for _ in range(3):
            model(torch.ones(2, 8, dtype=torch.float32 if opt_level else torch.bfloat16)).sum().backward()
            optimizer.step()
        return model, optimizer

    for opt_level in (None, "O2") if masters == "fp32" else (None,):
        model, optimizer = low(0, opt_level)
        save_checkpoint(tmp_path / "a.pt", model=model, optimizer=optimizer)
        content = torch.load(tmp_path / "a.pt")
        content["optimizer"]["masters"] = {0: torch.zeros(3)}
        torch.save(content, tmp_path / "a.pt")
        other, masters_of_other = low(1, opt_level)
        before = copy.deepcopy([other.state_dict(), masters_of_other.state_dict()])
        with pytest.raises(CheckpointError, match="the master of parameter 0 has shape"):
            load_checkpoint(tmp_path / "a.pt", model=other, optimizer=masters_of_other)
        assert_equal([other.state_dict(), masters_of_other.state_dict()], before)


def test_failed_write_leaves_the_last_good_one(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "a.pt", step=1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"No space left.*last one is intact"):
        save_checkpoint(tmp_path / "a.pt", step=2)
    assert load_checkpoint(tmp_path / "a.pt") == {"step": 1}
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_disk_that_is_full_amid_the_file_is_named(tmp_path):
    """torch.save() makes an error about its archive of what the file says."""
    path = tmp_path / "last.pt"
    save_checkpoint(path, step=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"File too large.*last one is intact"):
            save_checkpoint(path, model=torch.nn.Linear(200, 200))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (load_checkpoint(path), os.listdir(tmp_path)) == ({"step": 1}, ["last.pt"])


def test_what_cannot_be_pickled_is_named_and_leaves_no_file(tmp_path):
    save_checkpoint(tmp_path / "a.pt", step=1)
    with pytest.raises(CheckpointError, match=r"schedule= \(function\) cannot be pickled.*last one is intact"):
        save_checkpoint(tmp_path / "a.pt", step=2, schedule=lambda step: step)
    with pytest.raises(CheckpointError, match=r"history= \(list\)"):
        save_checkpoint(tmp_path / "b.pt", model=pieces(0)[0], history=[1, (number for number in range(3))])

    class Counting(torch.nn.Linear):
        def get_extra_state(self):
            return (number for number in range(3))

    with pytest.raises(CheckpointError, match=r"model= \(OrderedDict\)"):
        save_checkpoint(tmp_path / "b.pt", model=Counting(2, 2), step=3)
    assert load_checkpoint(tmp_path / "a.pt") == {"step": 1}
    assert os.listdir(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("extra", [argparse.Namespace(lr=1), {"nested": [argparse.Namespace(lr=1)]}])
def test_what_cannot_be_read_back_is_named_and_the_last_good_file_stays(tmp_path, extra):
    model = pieces(0)[0]
    save_checkpoint(tmp_path / "a.pt", step=1)
    kind = type(extra).__name__
    with pytest.raises(
        CheckpointError, match=rf"args= \({kind}\) is nothing that.*argparse\.Namespace.*last one is intact"
    ):
        save_checkpoint(tmp_path / "a.pt", model=model, step=2, args=extra)
    assert load_checkpoint(tmp_path / "a.pt") == {"step": 1}
    assert os.listdir(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("name", ["m[1].pt", "m*.pt"])
def test_names_with_wildcards_clean_up_after_themselves_only(tmp_path, name):
    (tmp_path / f".{name}.0123abcd.part").write_bytes(b"left behind")
    (tmp_path / ".m1.pt.0123abcd.part").write_bytes(b"another's")
    (tmp_path / f".{name}.pt.0123abcd.part").write_bytes(b"another's")
    save_checkpoint(tmp_path / name, step=1)
    assert load_checkpoint(tmp_path / name) == {"step": 1}
    assert sorted(os.listdir(tmp_path)) == sorted([name, ".m1.pt.0123abcd.part", f".{name}.pt.0123abcd.part"])


@pytest.mark.skipif(os.name == "nt", reason="links and modes of POSIX")
def test_a_link_and_the_mode_stay(tmp_path):
    (tmp_path / "runs").mkdir()
    save_checkpoint(tmp_path / "runs" / "step1.pt", step=1)
    (tmp_path / "runs" / "step1.pt").chmod(0o600)
    (tmp_path / "last.pt").symlink_to(tmp_path / "runs" / "step1.pt")
    save_checkpoint(tmp_path / "last.pt", step=2)
    assert (tmp_path / "last.pt").is_symlink() and load_checkpoint(tmp_path / "runs" / "step1.pt") == {"step": 2}
    assert (tmp_path / "runs" / "step1.pt").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "runs") == ["step1.pt"]


SAVING = """
import sys, torch, fxamp
model = torch.nn.Linear(256, 256)
for step in range(30):
    fxamp.save_checkpoint(sys.argv[1], model=model, step=step)
"""


def test_several_processes_may_write_one_file(tmp_path):
    """As ranks do that all save: each writes a draft of its own, and none takes another's away."""
    path = tmp_path / "all.pt"
    started = [subprocess.Popen([sys.executable, "-c", SAVING, path], stderr=subprocess.PIPE) for _ in range(3)]
    ended = [(process.communicate()[1].decode(), process.returncode) for process in started]
    assert [code for _, code in ended] == [0, 0, 0], ended
    assert os.listdir(tmp_path) == ["all.pt"]
    assert load_checkpoint(path, model=torch.nn.Linear(256, 256))["step"] == 29


def test_interrupted_write_leaves_no_part(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "a.pt", step=2)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("state", [[1, 2], {"weight": [1.0], "bias": torch.zeros(2)}])
def test_a_model_that_is_no_state_dict_is_told(tmp_path, state):
    torch.save({"fxamp_checkpoint": 1, "model": state, "extra": {}}, tmp_path / "a.pt")
    model = torch.nn.Linear(2, 2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match="does not fit"):
        load_checkpoint(tmp_path / "a.pt", model=model)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


PIECES = ("model", "optimizer", "scaler")


@pytest.mark.parametrize("use", [save_checkpoint, load_checkpoint])
@pytest.mark.parametrize(
    ("name", "culprit", "text"),
    [
        ("model", 5, "model= is a int"),
        ("model", torch.nn.Linear, "model= is the class Linear"),
        ("model", "state_dict", r"model= is a OrderedDict.*the model itself"),
        ("optimizer", [1], "optimizer= is a list"),
        ("model", "optimizer", "model= is a Adam"),
        ("optimizer", "model", "optimizer= is a Linear"),
        ("scaler", "model", "scaler= is a Linear"),
        ("optimizer", "scaler", "optimizer= is a LossScaler"),
    ],
)
def test_what_is_no_such_part_is_named_and_nothing_changes(tmp_path, use, name, culprit, text):
    parts = dict(zip(PIECES, trained(0), strict=True))
    save_checkpoint(tmp_path / "a.pt", **parts, step=1)
    others = dict(zip(PIECES, trained(1), strict=True))
    before = copy.deepcopy([part.state_dict() for part in others.values()])
    known = {**others, "state_dict": others["model"].state_dict()}
    given = {**others, name: known[culprit] if isinstance(culprit, str) else culprit}
    with pytest.raises(CheckpointError, match=text):
        use(tmp_path / "a.pt", **given)
    assert_equal([part.state_dict() for part in others.values()], before)
    assert load_checkpoint(tmp_path / "a.pt") == {"step": 1}
    assert os.listdir(tmp_path) == ["a.pt"]


@pytest.mark.parametrize(("content", "reason"), [(b"", "EOFError"), (b"hello", "KeyError")])
def test_a_file_of_something_else_is_told(tmp_path, content, reason):
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"a\.pt cannot be read as a checkpoint: .*torch\.save.*{reason}"):
        load_checkpoint(tmp_path / "a.pt")


def test_a_directory_and_a_link_to_nothing_are_told(tmp_path):
    (tmp_path / "link.pt").symlink_to(tmp_path / "gone.pt")
    with pytest.raises(CheckpointError, match="is a directory; give the file in it"):
        load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"link\.pt does not exist\.$"):
        load_checkpoint(tmp_path / "link.pt")


@pytest.mark.parametrize("masters", ["fp32", "kahan"])
def test_a_random_state_that_does_not_fit_leaves_the_masters_alone(tmp_path, masters):
    def trained(steps):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4).bfloat16()
        optimizer = MasterWeightOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), masters=masters)
        return model, optimizer, [step(model, optimizer, number) for number in range(steps)]

    def step(model, optimizer, number):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(number)).bfloat16()
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    path = tmp_path / "state.pt"
    model, optimizer, _ = trained(3)
    save_checkpoint(path, model=model, optimizer=optimizer)
    content = torch.load(path)
    content["random"]["cpu"] = torch.zeros(3, dtype=torch.uint8)
    torch.save(content, path)
    model, optimizer, _ = trained(7)
    twin, other, _ = trained(7)
    before = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=r"random state of .* does not fit.*Nothing was changed"):
        load_checkpoint(path, model=model, optimizer=optimizer)
    assert torch.equal(torch.get_rng_state(), before)
    for number in range(20, 60):
        step(model, optimizer, number)
        step(twin, other, number)
    for left, right in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(left, right)
    if masters == "fp32":
        assert all(map(torch.equal, optimizer.master_params(), other.master_params()))


@pytest.mark.parametrize("checks", [True, False])
def test_a_file_with_one_wrong_bit_is_refused(tmp_path, checks):
    """torch writes check sums, and does not read them."""
    model = torch.nn.Linear(8, 8)
    torch.serialization.set_crc32_options(checks)
    try:
        save_checkpoint(tmp_path / "last.pt", model=model)
        assert torch.serialization.get_crc32_options() == checks
    finally:
        torch.serialization.set_crc32_options(True)
    load_checkpoint(tmp_path / "last.pt", model=model)
    content = bytearray((tmp_path / "last.pt").read_bytes())
    place = content.index(bytes(model.weight.untyped_storage()))
    content[place + 3] ^= 0x40
    (tmp_path / "last.pt").write_bytes(content)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"damaged.*the check sum of .*data/.* is wrong"):
        load_checkpoint(tmp_path / "last.pt", model=model)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, MasterWeightOptimizer])
@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizers_state_of_other_shapes_is_refused(tmp_path, wrap, fused):
    """A fused step reads past its end, and the process dies."""

    def trained(size):
        weight = torch.nn.Parameter(torch.ones(size, size, dtype=torch.bfloat16))
        optimizer = wrap(torch.optim.Adam([weight], fused=fused))
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        return optimizer

    small, large = trained(2), trained(40)
    save_checkpoint(tmp_path / "last.pt", optimizer=small)
    before = copy.deepcopy(large.state_dict())
    with pytest.raises(CheckpointError, match=r"optimizer of .* has shape \(2, 2\).*\(40, 40\).*another model's"):
        load_checkpoint(tmp_path / "last.pt", optimizer=large)
    assert_equal(large.state_dict(), before)
    large.step()


def test_a_state_of_another_class_is_said_to_be_one(tmp_path):
    weight = torch.nn.Parameter(torch.ones(2))
    sgd, adam = torch.optim.SGD([weight], 0.1, momentum=0.9), torch.optim.Adam([weight])
    weight.grad = torch.ones_like(weight)
    sgd.step()
    save_checkpoint(tmp_path / "last.pt", optimizer=sgd)
    with pytest.raises(CheckpointError, match=r"it lacks 'step', so it is of another class. Nothing was changed"):
        load_checkpoint(tmp_path / "last.pt", optimizer=adam)


def test_a_lazy_model_takes_a_checkpoint(tmp_path):
    trained = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 2))
    trained(torch.ones(1, 4))
    save_checkpoint(tmp_path / "last.pt", model=trained)
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 2))
    load_checkpoint(tmp_path / "last.pt", model=lazy)
    assert torch.equal(lazy(torch.ones(1, 4)), trained(torch.ones(1, 4)))


def test_a_lazy_model_of_another_shape_is_as_it_was(tmp_path):
    save_checkpoint(tmp_path / "last.pt", model=torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 5)))
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 2))
    before = lazy[1].weight.detach().clone()
    with pytest.raises(CheckpointError, match="does not fit"):
        load_checkpoint(tmp_path / "last.pt", model=lazy)
    assert torch.equal(lazy[1].weight, before)


@pytest.mark.parametrize("name", ["a" * 300, "a" * 300 + "/last.pt"])
def test_a_path_that_the_file_system_refuses(name, tmp_path):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="name too long"):
        load_checkpoint(tmp_path / name, model=model)
    with pytest.raises(CheckpointError, match="name too long"):
        save_checkpoint(tmp_path / name, model=model)


def test_a_file_of_another_format_is_refused(tmp_path):
    torch.save({"fxamp_checkpoint": 2, "model": torch.nn.Linear(2, 2).state_dict()}, tmp_path / "last.pt")
    with pytest.raises(CheckpointError, match="format 2"):
        load_checkpoint(tmp_path / "last.pt", model=torch.nn.Linear(2, 2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_told_of(tmp_path):
    save_checkpoint(tmp_path / "last.pt", model=torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="map_location= is no device"):
        load_checkpoint(tmp_path / "last.pt", model=torch.nn.Linear(2, 2), map_location="cuda")


def test_a_lazy_model_whose_optimizer_does_not_fit(tmp_path):
    trained = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 2))
    trained(torch.ones(1, 4))
    save_checkpoint(tmp_path / "last.pt", model=trained, optimizer=torch.optim.SGD(trained.parameters(), 0.1))
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 2))
    before = lazy[1].weight.detach().clone()
    optimizer = torch.optim.SGD(lazy[1].parameters(), 0.1)
    with pytest.raises(CheckpointError, match=r"the optimizer of .* does not fit"):
        load_checkpoint(tmp_path / "last.pt", model=lazy, optimizer=optimizer)
    assert torch.equal(lazy[1].weight, before)
