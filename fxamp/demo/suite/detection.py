"""SSD-style detection: two feature maps, a default box in each of their cells, hard negative mining."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxamp.demo.suite.pictures import Scenes, scenes
from fxamp.demo.suite.task import SuiteTask
from fxamp.demo.tasks import Batch, draw, scans_of_digits

SIZE, SIDES = 24, (8, 12)
CELLS = (6, 3)
"""The feature maps: 6 x 6 cells for digits of 8 pixels, 3 x 3 for those of 12."""
CLASSES, GROUND = 10, 10
MATCH, NEGATIVES, SUPPRESS = 0.5, 3, 0.45
"""The overlap that makes a default box positive, negatives for each positive, the overlap of doubles (as in SSD)."""


def stage(channels: int, width: int) -> nn.Sequential:
    """Half the size, batch norm."""
    return nn.Sequential(nn.Conv2d(channels, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())


class Detector(nn.Module):
    """Gives, for each default box, four offsets and the logits of ten digits and the ground."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Sequential(stage(1, width), stage(width, 2 * width))
        self.coarse = stage(2 * width, 2 * width)
        self.places = nn.ModuleList(nn.Conv2d(2 * width, 4, 3, padding=1) for _ in CELLS)
        self.classes = nn.ModuleList(nn.Conv2d(2 * width, CLASSES + 1, 3, padding=1) for _ in CELLS)

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.stem(pictures)
        maps = (fine, self.coarse(fine))
        places = [head(x).flatten(2).transpose(1, 2) for head, x in zip(self.places, maps, strict=True)]
        classes = [head(x).flatten(2).transpose(1, 2) for head, x in zip(self.classes, maps, strict=True)]
        return torch.cat(places, 1), torch.cat(classes, 1)


def default_boxes() -> Tensor:
    """Centre and size of each, in pixels, (boxes, 4)."""
    found = []
    for cells, side in zip(CELLS, SIDES, strict=True):
        centres = (torch.arange(cells) + 0.5) * SIZE / cells
        y, x = torch.meshgrid(centres, centres, indexing="ij")
        found.append(torch.stack((x, y, torch.full_like(x, side), torch.full_like(x, side)), -1).flatten(0, 1))
    return torch.cat(found)


def corners(boxes: Tensor) -> Tensor:
    """Centre and size to left, top, right, bottom."""
    centre, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat((centre - size / 2, centre + size / 2), -1)


def overlaps(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of each pair: (..., n, 4) and (..., m, 4) to (..., n, m)."""
    low = torch.maximum(first[..., :, None, :2], second[..., None, :, :2])
    high = torch.minimum(first[..., :, None, 2:], second[..., None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (first, second)]
    return shared / (areas[0][..., :, None] + areas[1][..., None, :] - shared)


def encode(made: Scenes) -> Batch:
    """Pictures, and what each default box should say: offsets and class; the true boxes and labels beside them."""
    defaults = default_boxes()
    shared = overlaps(corners(defaults).expand(len(made.boxes), -1, -1), made.boxes)
    best, digit = shared.max(-1)
    closest = shared.argmax(1)  # each digit has its closest box, however little they share
    rows = torch.arange(len(digit))[:, None]
    digit[rows, closest], best[rows, closest] = torch.arange(digit.new_tensor(SIDES).numel()).expand_as(closest), 1.0
    boxes = made.boxes[rows, digit]
    centres, sizes = (boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]
    offsets = torch.cat(((centres - defaults[:, :2]) / defaults[:, 2:], (sizes / defaults[:, 2:]).log()), -1)
    classes = torch.where(best >= MATCH, made.labels[rows, digit], GROUND)
    return made.pictures, (offsets, classes, made.boxes, made.labels)


def multibox_loss(outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, ...]) -> Tensor:
    """Smooth L1 of the positive boxes' offsets, and cross entropy of them and of the hardest negatives."""
    (places, logits), (offsets, classes) = outputs, targets[:2]
    positive = classes != GROUND
    count = positive.sum()
    place = F.smooth_l1_loss(places[positive].float(), offsets[positive], reduction="sum")
    entropy = F.cross_entropy(logits.float().transpose(1, 2), classes, reduction="none")
    ground = entropy.masked_fill(positive, 0.0)
    rank = ground.argsort(1, descending=True).argsort(1)
    hard = rank < NEGATIVES * positive.sum(1, keepdim=True)
    return (place + entropy[positive].sum() + (ground * hard).sum()) / count


def mean_average_precision(outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, ...]) -> float:
    """Over the ten digits, at an overlap of one half.

    A box is dropped where one of the same class that overlaps it has a higher score, dropped or not.
    """
    places, logits = (output.float().cpu() for output in outputs)
    true_boxes, labels = (target.cpu() for target in targets[2:])
    defaults = default_boxes()
    found = torch.cat(
        (places[..., :2] * defaults[:, 2:] + defaults[:, :2], places[..., 2:].exp() * defaults[:, 2:]), -1
    )
    boxes, scores = corners(found), logits.softmax(-1)
    double = overlaps(boxes, boxes) > SUPPRESS
    same = overlaps(boxes, true_boxes) >= MATCH
    return (
        sum(
            average_precision(scores[..., c], double, same & (labels == c)[:, None], labels == c)
            for c in range(CLASSES)
        )
        / CLASSES
    )


def average_precision(scores: Tensor, double: Tensor, same: Tensor, wanted: Tensor) -> float:
    """Of one class: the area below precision over recall.

    Args:
        scores: (scenes, boxes).
        double: which boxes overlap, (scenes, boxes, boxes).
        same: which boxes are on which digit of this class, (scenes, boxes, digits).
        wanted: which digits are of this class, (scenes, digits).
    """
    first = torch.arange(scores.size(1))
    better = (scores[:, None, :] > scores[:, :, None]) | (
        (scores[:, None, :] == scores[:, :, None]) & (first[None, :] < first[:, None])
    )
    kept = ~(better & double).any(-1)
    scene, box = kept.nonzero(as_tuple=True)
    order = scores[scene, box].argsort(descending=True, stable=True)
    taken, right, area = set(), 0, 0.0
    for rank, at in enumerate(order.tolist(), 1):
        hits = [(int(scene[at]), digit) for digit in same[scene[at], box[at]].nonzero().flatten().tolist()]
        new = [hit for hit in hits if hit not in taken]
        if new:
            taken.add(new[0])
            right += 1
            area += right / rank
    return area / max(1, int(wanted.sum()))


def detection(device: torch.device, steps: int = 150, batch: int = 12, count: int = 2000) -> SuiteTask:
    """Two digits, one of 8 and one of 12 pixels, on windows of photographs."""
    learnt, tested = scans_of_digits(torch.device("cpu"))

    def placed(part: Batch, count: int, seed: int, *, held_out: bool) -> Batch:
        pictures, targets = encode(scenes(*part, count, SIZE, SIDES, seed, held_out=held_out))
        return pictures.to(device), tuple(target.to(device) for target in targets)

    return SuiteTask(
        name="detection",
        title="SSD-style detector, two feature maps; two digits on a photograph, 24 x 24 pixels",
        model=Detector,
        batches=draw(*placed(learnt, count, 3, held_out=False), steps, batch),
        held_out=placed(tested, 256, 4, held_out=True),
        steps=steps,
        learning_rate=2e-2,
        loss=multibox_loss,
        metric=mean_average_precision,
        measures="mAP at overlap 0.5",
        higher_is_better=True,
    )
