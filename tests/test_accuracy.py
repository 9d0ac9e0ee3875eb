"""The accuracy suite, two steps long: every task in every mode, what each metric measures, the tables, resumption."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from fxamp.demo import suite
from fxamp.demo.suite import records, spectrogram
from fxamp.demo.suite.adversarial import frechet_distance
from fxamp.demo.suite.detection import (
    GROUND,
    average_precision,
    corners,
    default_boxes,
    encode,
    mean_average_precision,
    multibox_loss,
    overlaps,
)
from fxamp.demo.suite.flow import GROUP, LENGTH, Flow
from fxamp.demo.suite.guide import MODELS
from fxamp.demo.suite.masked_lm import IGNORED, MASK, hide, masked_accuracy
from fxamp.demo.suite.modes import MODES, modes_of
from fxamp.demo.suite.pictures import Scenes, photographs, scenes, textures
from fxamp.demo.suite.recommender import hit_rate
from fxamp.demo.suite.records import POINTS, Record, Store, SuiteJob, TaskFacts, kernels, task_of, thin
from fxamp.demo.suite.recurrent_lm import perplexity
from fxamp.demo.suite.segmentation import overlap
from fxamp.demo.suite.speech import BANDS, DIGITS, FRAMES, distance, error_rate, rows_of_digits
from fxamp.demo.suite.table import page, verdicts
from fxamp.demo.suite.tasks import TASKS
from fxamp.demo.suite.text import Subwords
from fxamp.demo.suite.translation import camel, pairs
from fxamp.demo.tasks import OTHER, parts, scans_of_digits

for package in ("sklearn", "tqdm", "PIL", "matplotlib"):
    pytest.importorskip(package)

CPU = torch.device("cpu")
HERE = modes_of(CPU)


@pytest.fixture(autouse=True)
def threads():
    """As many as there were: the command takes one."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# --------------------------------------------------------------------------------------- every task, every mode


SHORT = {"recurrent_lm": 4, "translation": 4, "spectrogram": 8}
"""The length of a sequence; the graphs of recurrent layers grow with it."""


@pytest.fixture(scope="module", params=TASKS)
def small(request):
    """Its name, and the task with two steps of eight examples, eight held-out ones, and short sequences."""
    whole = TASKS[request.param](CPU, steps=2)
    length = SHORT.get(request.param)

    def some(values):
        cut = tuple(part[:8] if length is None else part[:8, ..., :length] for part in parts(values))
        return cut if isinstance(values, tuple) else cut[0]

    def batches(seed):
        for inputs, targets in whole.batches(seed):
            yield some(inputs), some(targets)

    held_out = tuple(map(some, whole.held_out))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spectrogram, "FRAMES", SHORT["spectrogram"])
        yield request.param, dataclasses.replace(whole, batches=batches, held_out=held_out)


def test_every_mode_trains_every_task(small, monkeypatch):
    name, task = small
    monkeypatch.setattr(records, "task_of", lambda *_: task)
    found = {mode: SuiteJob(name, mode, 1, "cpu").run(lambda: None) for mode in HERE}
    assert {mode: record.error for mode, record in found.items() if record.error} == {}
    for mode, record in found.items():
        assert math.isfinite(record.loss) and math.isfinite(record.metric) and math.isfinite(record.held_out_loss)
        # first weights and batch are fp32's; low precision moves a loss by a few of its roundings
        assert record.curve[0] == pytest.approx(found["fp32"].curve[0], rel=2e-2), mode
        assert (record.casts > 0) == (mode != "fp32")
        assert (record.low is not None and record.low > 0) == mode.startswith("O")
        assert len(record.curve) == record.steps == 2


def test_a_seed_decides_the_batches(small):
    _, task = small
    first, again, other = (next(task.batches(seed)) for seed in (1, 1, 2))
    for values, same in zip(map(parts, first), map(parts, again), strict=True):
        assert all(map(torch.equal, values, same))
    assert any(not torch.equal(a, b) for a, b in zip(parts(first[0]), parts(other[0]), strict=True))


def test_modes_are_what_their_names_say():
    mode = MODES["O1 aggressive bf16"]
    assert (mode.engine, mode.dtype, mode.level, mode.opt_level) == ("fxamp", torch.bfloat16, "aggressive", "O1")
    assert (MODES["O2 fp16"].opt_level, MODES["O2 fp16"].dtype) == ("O2", torch.float16)
    assert len({mode for name, mode in MODES.items() if name != "tf32"}) == len(MODES) - 1 == 11
    assert "tf32" not in HERE and "tf32" in modes_of(torch.device("cuda"))


def test_kernels_are_given_back():
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, convolution.allow_tf32, torch.backends.mkldnn.enabled)
    with kernels(onednn=False, tf32=True):
        assert (matmul.allow_tf32, convolution.allow_tf32) == (True, True)
        assert not torch._C._get_mkldnn_enabled()
    with kernels(onednn=True, tf32=False):
        assert (matmul.allow_tf32, convolution.allow_tf32) == (False, False)
        assert torch._C._get_mkldnn_enabled()
    assert (matmul.allow_tf32, convolution.allow_tf32, torch.backends.mkldnn.enabled) == before


def test_a_run_that_fails_is_a_record(monkeypatch):
    whole = TASKS["flow"]

    def broken(device, steps=2):
        return dataclasses.replace(whole(device, steps), model=lambda: torch.nn.Linear(1, 1))

    monkeypatch.setitem(records.TASKS, "flow", broken)
    task_of.cache_clear()
    record = SuiteJob("flow", "fp32", 1, "cpu").run(lambda: None)
    task_of.cache_clear()
    assert record.metric is None and record.error.startswith("TypeError: ")


# ---------------------------------------------------------------------------------------------- data and metrics


def test_textures_are_cut_from_their_own_part_of_the_photographs():
    left = {bytes(row.contiguous().numpy().tobytes()) for row in textures(40, 1, 8, 1, held_out=False)[:, 0]}
    edge = photographs()[0].size(1) * 2 // 3 + 1
    for window in textures(20, 1, 8, 1, held_out=True)[:, 0]:
        rights = [photo[:, edge - 1 :].unfold(1, 8, 1).flatten(0, 1) for photo in photographs()]
        assert any(bool((part == window).all(1).any()) for part in rights)
        assert bytes(window.contiguous().numpy().tobytes()) not in left


def test_a_scene_has_the_digits_that_it_says():
    learnt, _ = scans_of_digits(CPU)
    made = scenes(*learnt, 20, 24, (8, 12), 1, held_out=False)
    for ink, boxes in zip(made.ink[:, 0], made.boxes.long(), strict=True):
        outside = ink.clone()
        for left, top, right, bottom in boxes.tolist():
            assert ink[top:bottom, left:right].sum() > 1
            outside[top:bottom, left:right] = 0
        assert outside.sum() == 0
    shared = overlaps(made.boxes, made.boxes)
    assert torch.equal(shared, torch.eye(2).expand(20, 2, 2))
    assert made.pictures.min() >= 0 and made.pictures.max() <= 1


def test_overlap_of_masks():
    masks = torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert overlap(torch.tensor([1.0, -1.0, 1.0, -1.0]), masks) == 1 / 3
    assert overlap(masks - 0.5, masks) == 1


def test_a_detector_that_says_the_targets_has_full_precision():
    learnt, _ = scans_of_digits(CPU)
    _, targets = encode(scenes(*learnt, 60, 24, (8, 12), 1, held_out=False))
    offsets, classes = targets[:2]
    logits = torch.nn.functional.one_hot(classes, GROUND + 1).float() * 20
    assert set(targets[3].flatten().tolist()) == set(range(10))
    assert mean_average_precision((offsets, logits), targets) == pytest.approx(1.0)
    assert multibox_loss((offsets, logits), targets).item() < 1e-4
    assert mean_average_precision((offsets, logits.roll(1, -1)), targets) < 0.2


def test_every_digit_has_a_default_box():
    digit = torch.tensor([[[0.0, 0.0, 8.0, 8.0], [10.5, 11.0, 22.5, 23.0]]])
    none = torch.zeros(1, 1, 24, 24)
    _, (offsets, classes, *_) = encode(Scenes(none, none, digit, torch.tensor([[3, 5]])))
    assert {3, 5} < set(classes[0].tolist())
    found = default_boxes()[classes[0] == 5][0]
    centre = found[:2] + offsets[0][classes[0] == 5][0][:2] * found[2:]
    assert centre.tolist() == [16.5, 17.0]
    assert corners(torch.tensor([4.0, 4.0, 8.0, 8.0])).tolist() == [0, 0, 8, 8]


@pytest.mark.parametrize(
    ("scores", "same", "precision"),
    [
        ([0.9, 0.1, 0.0], [1, 0, 0], 1.0),
        ([0.1, 0.9, 0.0], [1, 0, 0], 0.5),  # the wrong one first
        ([0.9, 0.8, 0.0], [1, 1, 0], 1.0),  # the second find of the same digit counts as wrong
        ([0.9, 0.8, 0.7], [0, 0, 0], 0.0),
    ],
)
def test_average_precision_of_one_digit(scores, same, precision):
    boxes = torch.tensor(same, dtype=torch.bool)[None, :, None]
    none = torch.zeros(1, 3, 3, dtype=torch.bool)
    assert average_precision(torch.tensor([scores]), none, boxes, torch.tensor([[True]])) == precision


def test_perplexity_of_a_guess_is_the_number_of_symbols():
    assert perplexity(torch.zeros(2, 3, 50), torch.zeros(2, 3, dtype=torch.long)) == pytest.approx(50)


def test_subwords():
    symbols = Subwords("return self\n" * 50 + "print(x)\n", size=110)
    text = "return self, é"
    numbers = symbols.encode(text).tolist()
    names = {number: piece for piece, number in symbols.numbers.items()}
    assert "".join(names.get(number, "?") for number in numbers) == "return self, ?"
    assert len(numbers) < len(text) / 2 and numbers[-1] == OTHER
    assert max(names) < 110 and OTHER not in names


def test_hidden_words_are_the_targets():
    text = torch.arange(100).view(10, 10)
    shown, targets = hide(text, torch.Generator().manual_seed(0))
    hidden = targets != IGNORED
    assert 0 < hidden.sum() < 40
    assert torch.equal(hidden, shown == MASK)
    assert torch.equal(torch.where(hidden, targets, shown), text)
    logits = torch.nn.functional.one_hot(torch.where(hidden, targets, 0), 100).float()
    assert masked_accuracy(logits, targets) == 1
    assert masked_accuracy(logits.roll(1, -1), targets) == 0


def test_names_and_their_translations():
    assert camel("read_all_lines") == "readAllLines"
    (source, target), answer = pairs("read_all = 1; x = read_all; camelCase", CPU)
    assert len(source) == 1
    assert torch.equal(target[0, 1:], answer[0, :-1] * (answer[0, :-1] != 2))  # the next one; 2 is the end
    learnt, tested = (set(map(tuple, names.tolist())) for names in _names())
    assert len(learnt) > 1000 and len(tested) > 50 and not learnt & tested


def _names():
    task = TASKS["translation"](CPU, steps=60)
    return torch.cat([inputs[0] for seed in (1, 2) for inputs, _ in task.batches(seed)]), task.held_out[0][0]


def test_the_held_out_name_of_a_module_is_never_learnt():
    task = TASKS["recommender"](CPU, steps=40)
    (users, items), truth = task.held_out
    assert truth.sum() == len(truth) and bool((truth[:, 0] == 1).all())
    kept = set(zip(users[:, 0].tolist(), items[:, 0].tolist(), strict=True))
    for (some, names), used in task.batches(1):
        right = used.bool()
        assert not kept & set(zip(some[right].tolist(), names[right].tolist(), strict=True))
        assert bool(right[:, 0].all())


def test_hit_rate():
    scores = torch.arange(20.0).expand(3, 20).clone()
    scores[:, 0] = torch.tensor([19.5, 9.5, 10.5])  # better than all; ten are better; nine are better
    assert hit_rate(scores, scores) == 2 / 3
    assert hit_rate(torch.zeros(4, 100), scores) == 0
    assert hit_rate(torch.zeros(4, 20), scores) == 1  # 9.5 better


@pytest.mark.parametrize(
    ("found", "wanted", "edits"),
    [([1, 2, 3], [1, 2, 3], 0), ([1, 3], [1, 2, 3], 1), ([], [1, 2], 2), ([4, 1, 2], [1, 2], 1), ([2, 1], [1, 2], 2)],
)
def test_edits(found, wanted, edits):
    assert distance(found, wanted) == distance(wanted, found) == edits


def test_transcriptions_drop_blanks_and_repeats():
    symbols = torch.tensor([[10, 3, 3, 10, 3, 7, 7, 10], [1, 1, 10, 10, 2, 2, 2, 2]])
    logits = torch.nn.functional.one_hot(symbols, 11).float()
    assert error_rate(logits, torch.tensor([[3, 3, 7], [1, 2, 5]])) == 1 / 6


def test_rows_of_digits_hold_their_scans():
    part = scans_of_digits(CPU)[1]
    frames, digits = rows_of_digits(part, 30, 1)
    assert frames.shape == (30, BANDS, FRAMES) and digits.shape == (30, DIGITS)
    drawn = torch.randint(len(part[0]), (30, DIGITS), generator=torch.Generator().manual_seed(1))
    assert torch.equal(part[1][drawn], digits)
    assert torch.allclose(frames.sum((1, 2)), part[0][drawn].sum((1, 2, 3, 4)))


def test_the_volume_of_a_flow_is_its_jacobians():
    torch.manual_seed(0)
    flow = Flow().double()
    for parameter in flow.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    mel, wave = torch.randn(1, 2, LENGTH // GROUP).double(), torch.randn(1, LENGTH).double()
    jacobian = torch.autograd.functional.jacobian(lambda x: flow(mel, x)[0].flatten(), wave)
    volume = torch.linalg.slogdet(jacobian.reshape(LENGTH, LENGTH))[1]
    assert flow(mel, wave)[1].item() == pytest.approx(volume.item(), rel=1e-9)


def test_distance_of_distributions():
    torch.manual_seed(0)
    scans = torch.rand(500, 1, 8, 8)
    assert frechet_distance(scans, scans) == pytest.approx(0, abs=1e-6)  # root of float64's rounding, 64 times
    assert frechet_distance(scans + 0.5, scans) == pytest.approx(64 * 0.25, abs=1e-5)
    assert frechet_distance(scans * 2 - scans.mean(0), scans) == pytest.approx(scans.var(0).sum().item(), rel=0.01)


def test_curves_are_means_of_neighbours():
    assert thin([1.0, 3.0]) == (1.0, 3.0)
    assert thin([float(number) for number in range(2 * POINTS)])[:2] == (0.5, 2.5)
    assert len(thin([1.0] * 33)) == POINTS


# ----------------------------------------------------------------------------------------------- tables and claims


def record(mode, seed, metric, **more):
    return Record("detection", mode, seed, 10, 2.0, 2.1, metric, 1, 2, 3.0, 0, 1.0, (3.0, 2.0), **more)


@pytest.fixture
def store(tmp_path):
    """fp32's seeds between 0.50 and 0.60."""
    kept = Store(tmp_path / "accuracy.json", {"torch": "2"})
    kept.tasks["detection"] = TaskFacts("SSD", "mAP", True, 1234, 10)
    for seed, metric in enumerate((0.50, 0.60, 0.55), 1):
        kept.add(record("fp32", seed, metric))
    return kept


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ((0.50, 0.50, 0.50), "yes"),
        ((0.60, 0.60, 0.60), "yes"),
        ((0.40, 0.60, 0.62), "yes"),  # the mean counts
        ((0.49, 0.50, 0.50), "NO: worse by 0.0033"),
        ((0.70, 0.70, 0.70), "NO: better by 0.1"),
        ((0.55, float("nan"), 0.55), "NO: not a number"),
        ((0.55, 0.55), "NO: 2 of 3 seeds so far"),
        ((0.55, 0.55, 0.55, 0.55), "NO: seeds 1, 2, 3, 4 of 10 steps; fp32: seeds 1, 2, 3 of 10 steps"),
    ],
)
def test_a_claim(store, metrics, text):
    for seed, metric in enumerate(metrics, 1):
        store.add(record("O1 strict fp16", seed, metric))
    (found,) = verdicts(store)
    assert found.is_claim and found.text == text and found.holds == (text == "yes")
    printed = page(store, "accuracy")
    assert f"**{int(found.holds)} of 1 rows of fxamp are within fp32's spread; of autocast's, 0 of 0.**" in printed
    assert (f"- detection, O1 strict fp16: {text}" in printed) == (not found.holds)
    (line,) = [line for line in printed.splitlines() if line.startswith("| O1 strict fp16")]
    assert text in line


def test_other_seeds_and_other_steps_are_not_held_against_fp32s(store):
    for seed in (7, 8, 9):
        store.add(dataclasses.replace(record("O1 strict fp16", seed, 0.55), steps=2))
    for seed in (1, 2, 3):
        store.add(dataclasses.replace(record("O2 fp16", seed, 0.55), steps=10 if seed < 3 else 2))
    strict, lowered = verdicts(store)
    assert strict.text == "NO: seeds 7, 8, 9 of 2 steps; fp32: seeds 1, 2, 3 of 10 steps"
    assert lowered.text == "NO: seeds 1, 2 of 10 steps and seeds 3 of 2 steps; fp32: seeds 1, 2, 3 of 10 steps"
    assert (strict.holds, lowered.holds) == (False, False)


def test_one_seed_has_no_spread(tmp_path, capsys):
    kept = Store(tmp_path / "accuracy.json", {"torch": "2"})
    kept.tasks["detection"] = TaskFacts("SSD", "mAP", True, 1234, 10)
    for mode in ("fp32", "autocast fp16", "O2 fp16"):
        kept.add(record(mode, 1, 0.55))
    assert [(one.holds, one.text) for one in verdicts(kept)] == [(None, "needs 2 seeds")] * 2
    printed = page(kept, "accuracy")
    assert "**No row can be held against fp32's spread: it needs 2 seeds.**" in printed
    assert "rows of fxamp are within" not in printed and "0.55\\*" not in printed
    assert suite.main(["--tables", "--out", str(tmp_path)]) == 1
    assert "| needs 2 seeds " in capsys.readouterr().out


def test_lower_can_be_better(store):
    store.tasks["detection"] = dataclasses.replace(store.tasks["detection"], higher_is_better=False)
    for seed in (1, 2, 3):
        store.add(record("O2 bf16", seed, 0.65))
    assert verdicts(store)[0].text == "NO: worse by 0.05"


def test_a_failed_run_and_autocasts_rows_are_shown(store):
    failed = Record("detection", "O2 fp16", 1, 10, error="RuntimeError: no kernel")
    for one in (
        failed,
        record("autocast fp16", 1, 0.9),
        record("autocast fp16", 2, 0.9),
        record("autocast fp16", 3, 0.9),
    ):
        store.add(one)
    printed = page(store, "accuracy")
    assert "0 of 1 rows of fxamp are within fp32's spread; of autocast's, 0 of 1." in printed
    assert "- detection, O2 fp16: NO: failed, RuntimeError: no kernel" in printed
    assert "- detection, autocast" not in printed
    assert "0.9\\*" in printed  # marked in the table of all tasks


def test_a_seed_that_failed_is_not_made_up_for_by_the_others(store, capsys):
    for seed in (1, 2):
        store.add(record("O2 fp16", seed, 0.55))
    store.add(Record("detection", "O2 fp16", 3, 10, error="RuntimeError: no kernel"))
    (found,) = verdicts(store)
    assert (found.holds, found.text) == (False, "NO: failed, RuntimeError: no kernel")
    assert suite.main(["--tables", "--out", str(store.path.parent)]) == 1
    assert "- detection, O2 fp16: NO: failed" in capsys.readouterr().out


def test_rows_with_autocasts_numbers_are_counted(store):
    for seed, metric in enumerate((0.55, 0.56), 1):
        for mode in ("autocast fp16", "autocast bf16", "O1 strict fp16"):
            store.add(record(mode, seed, metric))
        store.add(record("O2 fp16", seed, 0.55))
        store.add(record("O1 strict bf16", seed, metric + 1e-9))
    assert "1 of 3 rows of fxamp have exactly the metrics of autocast" in page(store, "accuracy")


def test_every_model_of_the_guide_has_a_row(store):
    table = page(store, "accuracy").split("## The models of the guide")[1]
    for name in ("ResNet-50", "ResNeXt101", "SE-ResNeXt101", "Jasper", "BERT", "BERT Q&A", "Tacotron 2", "WaveGlow",
                 "SSD300", "SSD320", "SSD-RN50-FPN-640", "NCF", "Transformer", "GNMT v2", "U-Net Medical",
                 "U-Net Industrial", "Sentiment Analysis", "FAIRSeq", "bigLSTM"):  # fmt: skip
        assert any(f" {name}" in line.split("|")[1] for line in table.splitlines() if line.startswith("|")), name
    assert {task for model in MODELS for task in model.tasks} == set(TASKS)
    assert "detection: 1,234 parameters" in table


@pytest.mark.parametrize("base", ["accuracy", "accuracy-cuda"])
def test_the_committed_page_is_what_the_committed_runs_give(base):
    """On a GPU the levels were compared on one task, and three seeds were run."""
    docs = Path(__file__).parent.parent / "docs"
    kept = Store(docs / f"{base}.json", {})
    assert page(kept, base) == (docs / f"{base}.md").read_text()
    steps = {name: facts.steps for name, facts in kept.facts()}
    done = {(one.task, one.mode, one.seed) for one in kept.records if one.steps == steps[one.task]}
    modes, seeds = dict.fromkeys(TASKS, HERE), suite.SEEDS
    if base == "accuracy-cuda":
        main = [mode for mode in MODES if "strict" not in mode and "aggressive" not in mode]
        modes = dict.fromkeys(TASKS, main) | {"speech": list(MODES)}
        seeds = (1, 2, 3)
    assert done == {(task, mode, seed) for task in TASKS for mode in modes[task] for seed in seeds}


# --------------------------------------------------------------------------------------------------- resumption


def test_the_file_is_read_back(store):
    again = Store(store.path, {"torch": "another"})
    assert (again.records, again.tasks, again.machine) == (store.records, store.tasks, store.machine)
    assert [path.name for path in store.path.parent.iterdir()] == ["accuracy.json"]
    assert len(json.loads(store.path.read_text())["runs"]) == 3


def test_what_is_done(store):
    job = SuiteJob("detection", "fp32", 1, "cpu")
    assert store.has(job, steps=10)
    assert not store.has(job, steps=11)
    assert not store.has(dataclasses.replace(job, seed=4), steps=10)
    assert not store.has(dataclasses.replace(job, mode="O2 fp16"), steps=10)
    store.add(Record("detection", "fp32", 1, 10, error="RuntimeError: once"))
    assert not store.has(job, steps=10) and len(store.records) == 3


def test_a_run_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    arguments = ["--only", "flow", "--steps", "2", "--seeds", "1", "2", "--modes", "fp32", "O1 balanced bf16"]
    arguments += ["--out", str(tmp_path)]
    whole, ran = SuiteJob.run, []

    def stopped(job, on_step):
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append((job.mode, job.seed))
        return whole(job, on_step)

    monkeypatch.setattr(SuiteJob, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        suite.main(arguments)
    assert len(Store(tmp_path / "accuracy.json", {}).records) == 3
    monkeypatch.setattr(SuiteJob, "run", lambda job, on_step: ran.append((job.mode, job.seed)) or whole(job, on_step))
    suite.main(arguments)
    suite.main([*arguments, "--tables"])
    assert sorted(ran) == [(mode, seed) for mode in ("O1 balanced bf16", "fp32") for seed in (1, 2)]
    printed = capsys.readouterr().out
    assert printed.strip().endswith((tmp_path / "accuracy.md").read_text().strip())
    assert (tmp_path / "accuracy.png").stat().st_size > 1000


def test_processes_are_started_once_for_all_tasks(tmp_path, monkeypatch, capsys):
    """On a GPU each needs seconds for its first op."""

    class Noted(suite.Runner):
        def __init__(self, workers, steps):
            made.append(workers)
            super().__init__(1, steps)

    made = []
    monkeypatch.setattr(suite, "Runner", Noted)
    arguments = ["--only", "flow", "adversarial", "--steps", "2", "--seeds", "1", "--modes", "fp32", "--jobs", "2"]
    suite.main([*arguments, "--out", str(tmp_path)])
    assert made == [2]
    assert {one.task for one in Store(tmp_path / "accuracy.json", {}).records} == {"flow", "adversarial"}


def test_tables_of_a_gpus_runs_are_written_where_there_is_none(store, capsys):
    """The file comes from a machine that is given back."""
    (store.path.parent / "accuracy-cuda.json").write_text(store.path.read_text())
    assert suite.main(["--tables", "--device", "cuda", "--out", str(store.path.parent)]) in (0, 1)
    assert (store.path.parent / "accuracy-cuda.md").read_text().strip() in capsys.readouterr().out


@pytest.fixture
def no_runs(monkeypatch):
    """Nothing is trained: what is refused is refused before."""
    monkeypatch.setattr(suite, "train", lambda *_: pytest.fail("trained"))


def refusal(capsys, *arguments) -> str:
    """What is printed where the command ends with 2."""
    with pytest.raises(SystemExit) as ended:
        suite.main([str(argument) for argument in arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["torch", "python", "device"])
def test_runs_of_another_machine_are_not_mixed_with_these(tmp_path, no_runs, capsys, name):
    there = suite.machine(CPU) | {name: "another"}
    Store(tmp_path / "accuracy.json", there).write()
    before = (tmp_path / "accuracy.json").read_text()
    printed = refusal(capsys, "--out", tmp_path)
    assert f"{name} another" in printed and "Give another folder with --out, or redraw" in printed
    assert [file.name for file in tmp_path.iterdir()] == ["accuracy.json"]
    assert (tmp_path / "accuracy.json").read_text() == before
    assert suite.main(["--tables", "--out", str(tmp_path)]) == 0
    assert f"{name} another" in (tmp_path / "accuracy.md").read_text()


def test_short_runs_do_not_replace_those_of_the_docs(no_runs, capsys):
    for out in ((), ("--out", suite.DOCS.resolve())):
        assert "would be replaced. Give another folder with --out." in refusal(capsys, "--steps", 2, *out)


def test_what_cannot_be_done_is_said_before_the_work(tmp_path, no_runs, capsys):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert f"--out {out}: " in refusal(capsys, "--out", out)
    assert "give at least 2" in refusal(capsys, "--steps", 1, "--out", tmp_path)
    for device in ("cpu", "cuda"):
        assert "--tables: there is no " in refusal(capsys, "--tables", "--device", device, "--out", tmp_path)
    assert "--device cuda:99: " in refusal(capsys, "--device", "cuda:99", "--out", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_the_exit_code_tells_of_a_broken_claim(store, capsys):
    arguments = ["--tables", "--out", str(store.path.parent)]
    for seed in (1, 2, 3):
        store.add(record("O2 fp16", seed, 0.55))
    assert suite.main(arguments) == 0
    for seed in (1, 2, 3):
        store.add(record("autocast fp16", seed, 0.9))
    assert suite.main(arguments) == 0, "autocast's rows are no claims"
    store.add(Record("detection", "tf32", 1, 10, error="RuntimeError: no kernel"))
    assert suite.main(arguments) == 1
    store.add(record("tf32", 1, 0.55))
    assert suite.main(arguments) == 0
    store.add(record("O2 fp16", 3, 0.0))
    assert suite.main(arguments) == 1
    assert "- detection, O2 fp16: NO: worse by" in capsys.readouterr().out
