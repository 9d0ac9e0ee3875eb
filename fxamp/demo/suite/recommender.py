"""Neural collaborative filtering: which module of the standard library uses which name, from implicit feedback."""

import collections
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxamp.demo.suite.task import SuiteTask
from fxamp.demo.suite.text import library_with_packages
from fxamp.demo.tasks import Batch

NAME = re.compile(r"[A-Za-z_]\w{2,}")
RARE, COMMON = 8, 0.15
"""Names that fewer modules use, or a larger share of them, are left out."""
NEGATIVES, OTHERS = 4, 99
"""Names not used: for each used one in training, and beside the held-out one in the test (as in the paper)."""
TOP = 10


class NeuMF(nn.Module):
    """Two ways to match a user and an item: a product of embeddings, and a perceptron on both."""

    def __init__(self, users: int, items: int, width: int = 16) -> None:
        super().__init__()
        self.user_factors, self.item_factors = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_features, self.item_features = nn.Embedding(users, 2 * width), nn.Embedding(items, 2 * width)
        self.perceptron = nn.Sequential(
            nn.Linear(4 * width, 2 * width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * width, width), nn.ReLU()
        )
        self.head = nn.Linear(2 * width, 1)
        for table in (self.user_factors, self.item_factors, self.user_features, self.item_features):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        product = self.user_factors(users) * self.item_factors(items)
        matched = self.perceptron(torch.cat((self.user_features(users), self.item_features(items)), -1))
        return self.head(torch.cat((product, matched), -1)).squeeze(-1)  # type: ignore[no-any-return]


def used_names() -> Tensor:
    """Which module uses which name, a matrix of booleans."""
    modules = [set(NAME.findall(text)) for text in library_with_packages().values()]
    counts = collections.Counter(name for names in modules for name in names)
    names = sorted(name for name, count in counts.items() if RARE <= count <= COMMON * len(modules))
    return torch.tensor([[name in names_of_it for name in names] for names_of_it in modules if len(names_of_it) > TOP])


def hit_rate(scores: Tensor, used: Tensor) -> float:
    """Share of users whose held-out item, the first of each row, is among the ten with the highest scores.

    Low precision gives many items one score: half of those that share the held-out one's are taken as better.
    """
    kept, others = scores[:, :1].float(), scores[:, 1:].float()
    better = (others > kept).sum(1) + (others == kept).sum(1) / 2
    return int((better < TOP).sum()) / len(scores)


def recommender(device: torch.device, steps: int = 300, batch: int = 160) -> SuiteTask:
    """One used name of each module is held out, and ranked among 99 that the module does not use."""
    used = used_names()
    generator = torch.Generator().manual_seed(0)
    used = used[used.sum(1) >= 2]
    everyone = torch.arange(len(used))
    kept = torch.multinomial(used.float(), 1, generator=generator)
    others = torch.multinomial((~used).float(), OTHERS, generator=generator)
    learnt = used.clone()
    learnt[everyone, kept[:, 0]] = False
    positives = learnt.nonzero().to(device)
    candidates = torch.cat((kept, others), 1).to(device)
    truth = torch.zeros(candidates.shape, device=device)
    truth[:, 0] = 1

    def batches(seed: int) -> Iterator[Batch]:
        drawn = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            users, items = positives[torch.randint(len(positives), (batch,), generator=drawn).to(device)].T
            wrong = torch.randint(used.size(1), (batch, NEGATIVES), generator=drawn).to(device)
            rows = torch.cat((items[:, None], wrong), 1)
            yield (users[:, None].expand_as(rows), rows), learnt_on_device[users[:, None], rows]

    learnt_on_device = learnt.float().to(device)
    return SuiteTask(
        name="recommender",
        title=f"NCF; {len(used)} modules of the standard library and {used.size(1)} names that they use",
        model=lambda: NeuMF(len(used), used.size(1)),
        batches=batches,
        held_out=((everyone[:, None].to(device).expand_as(candidates), candidates), truth),
        steps=steps,
        learning_rate=1e-2,
        loss=F.binary_cross_entropy_with_logits,
        metric=hit_rate,
        measures="hit rate at 10 of 100",
        higher_is_better=True,
    )
