"""Real pictures for the suite: scikit-learn's two photographs, its scans of digits, and scenes made of both."""

import dataclasses
import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from fxamp.demo.tasks import load

GROUND = 0.5
"""How bright the photograph is below the ink, whose brightest pixel is 1."""
HELD_OUT_SHARE = 3
"""The right third of each photograph is held out."""


@functools.cache
def photographs() -> tuple[Tensor, ...]:
    """`china.jpg` and `flower.jpg` as grey values in 0 to 1, (427, 640) each."""
    load("PIL")  # scikit-learn reads them with it
    images = load("sklearn.datasets").load_sample_images().images
    return tuple(torch.from_numpy(image.copy()).float().mean(-1) / 255 for image in images)


def textures(count: int, height: int, width: int, seed: int, *, held_out: bool) -> Tensor:
    """Random windows of the photographs, (count, height, width)."""
    generator = torch.Generator().manual_seed(seed)
    photos = photographs()
    found = []
    for number in range(count):
        photo = photos[number % len(photos)]
        edge = photo.size(1) - photo.size(1) // HELD_OUT_SHARE
        photo = photo[:, edge:] if held_out else photo[:, :edge]
        top = int(torch.randint(photo.size(0) - height + 1, (), generator=generator))
        left = int(torch.randint(photo.size(1) - width + 1, (), generator=generator))
        found.append(photo[top : top + height, left : left + width])
    return torch.stack(found)


@dataclasses.dataclass(frozen=True)
class Scenes:
    """Pictures with digits written on them.

    Attributes:
        pictures: (scenes, 1, size, size), in 0 to 1.
        ink: the share of ink in each pixel, of the same shape.
        boxes: left, top, right and bottom of each digit in pixels, (scenes, digits, 4).
        labels: (scenes, digits).
    """

    pictures: Tensor
    ink: Tensor
    boxes: Tensor
    labels: Tensor


def scenes(
    scans: Tensor, labels: Tensor, count: int, size: int, sizes: tuple[int, ...], seed: int, *, held_out: bool
) -> Scenes:
    """Write one digit of each of `sizes` on `count` textures, the digits apart from each other, as bright ink."""
    generator = torch.Generator().manual_seed(seed)
    grounds = textures(count, size, size, seed, held_out=held_out)
    ink = torch.zeros_like(grounds)
    drawn = torch.randint(len(scans), (count, len(sizes)), generator=generator)
    boxes = torch.stack([apart(size, sizes, generator) for _ in range(count)])
    for scene in range(count):
        for place, side in enumerate(sizes):
            left, top, right, bottom = boxes[scene, place].tolist()
            scan = scans[drawn[scene, place]].unsqueeze(0)
            digit = F.interpolate(scan, side, mode="bilinear", align_corners=False)[0, 0]
            ink[scene, top:bottom, left:right] = digit
    pictures = grounds * GROUND * (1 - ink) + ink
    return Scenes(pictures.unsqueeze(1), ink.unsqueeze(1), boxes.float(), labels[drawn])


def apart(size: int, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random squares of these sizes that do not overlap, as left, top, right and bottom, (squares, 4)."""
    while True:
        corners = torch.stack([torch.randint(size - side + 1, (2,), generator=generator) for side in sizes])
        ends = corners + torch.tensor(sizes)[:, None]
        clear = ((corners[:, None] >= ends[None]) | (corners[None] >= ends[:, None])).any(-1)
        if bool((clear | torch.eye(len(sizes), dtype=torch.bool)).all()):
            return torch.cat((corners, ends), 1)
