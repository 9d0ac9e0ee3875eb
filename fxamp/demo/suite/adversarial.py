"""A GAN: two models, two optimizers, one loss scaler."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxamp.demo.loop import Mode, Run
from fxamp.demo.suite.task import SuiteTask
from fxamp.demo.tasks import Values, draw, scans_of_digits

NOISE = 16
HELD_OUT_SEED = 11


class Generator(nn.Module):
    """Noise to 8 x 8 scans, by a transposed convolution."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.start = nn.Sequential(
            nn.Linear(NOISE, 16 * width), nn.BatchNorm1d(16 * width), nn.ReLU(), nn.Unflatten(1, (width, 4, 4))
        )
        self.body = nn.Sequential(
            nn.ConvTranspose2d(width, width, 4, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 1, 3, padding=1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, noise: Tensor) -> Tensor:
        return self.body(self.start(noise))  # type: ignore[no-any-return]


class Critic(nn.Module):
    """Scans to the logit of being real."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, scans: Tensor) -> Tensor:
        return self.body(scans).squeeze(1)  # type: ignore[no-any-return]


class AdversarialRun(Run):
    """The generator is the run's model, the critic stands beside it; both are converted, each has its optimizer."""

    def __init__(self, task: SuiteTask, mode: Mode, seed: int) -> None:
        super().__init__(task, mode, seed)
        _, scans = next(task.batches(seed))
        self.critic = self.prepared(Critic(), scans)
        self.critic_optimizer = self.optimizer_of(self.critic)
        self.models.append(self.critic)
        self.optimizers.append(self.critic_optimizer)

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """With the first moment that GANs use."""
        optimizer = super().optimizer_of(model)
        for group in optimizer.param_groups:
            group["betas"] = (0.5, 0.99)
        return optimizer

    def step(self, noise: Values, scans: Values) -> float:
        """The critic's step, then the generator's; returns the critic's loss."""
        self.model.train()
        self.critic.train()
        self.optimizer.zero_grad()
        self.critic_optimizer.zero_grad()
        with self.precision():
            made = self.model(noise)
            loss = self.critic_loss(made.detach(), scans)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.critic_optimizer)
        with self.precision():
            fooled = opinion(self.critic(made), real=True)
        self.scaler.scale(fooled).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.update_scale()
        return loss.item()

    def critic_loss(self, made: Tensor, scans: Values) -> Tensor:
        """How badly it tells the made from the real."""
        return opinion(self.critic(scans), real=True) + opinion(self.critic(made), real=False)

    @torch.no_grad()
    def test(self, inputs: Values, targets: Values) -> tuple[float, float]:
        """The critic's loss, and how far the made scans are from the held-out ones."""
        self.model.eval()
        self.critic.eval()
        with self.precision():
            made = self.model(inputs)
            loss = self.critic_loss(made, targets)
        return loss.item(), self.task.metric(made, targets)


def opinion(logits: Tensor, *, real: bool) -> Tensor:
    """Cross entropy where all are real, or all are made."""
    return F.binary_cross_entropy_with_logits(logits.float(), torch.full(logits.shape, float(real)).to(logits.device))


def frechet_distance(made: Tensor, real: Tensor) -> float:
    """Between two normal distributions with their means and covariances, over the pixels, in float64."""
    first, second = (scans.flatten(1).double().cpu() for scans in (made, real))
    covariances = [torch.cov(scans.T) for scans in (first, second)]
    values, vectors = torch.linalg.eigh(covariances[0])
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    shared = torch.linalg.eigvalsh(root @ covariances[1] @ root).clamp(min=0).sqrt().sum()
    means = (first.mean(0) - second.mean(0)).square().sum()
    return float(means + covariances[0].trace() + covariances[1].trace() - 2 * shared)


def adversarial(device: torch.device, steps: int = 180, batch: int = 32) -> SuiteTask:
    """scikit-learn's digits."""
    learnt, tested = scans_of_digits(device)

    def noise(count: int, seed: int) -> Tensor:
        return torch.randn(count, NOISE, generator=torch.Generator().manual_seed(seed)).to(device)

    return SuiteTask(
        name="adversarial",
        title="convolutional GAN, two optimizers and one scaler; scans of digits",
        model=Generator,
        batches=draw(noise(4096, HELD_OUT_SEED + 1), learnt[0].repeat(4, 1, 1, 1)[:4096], steps, batch),
        held_out=(noise(len(tested[0]), HELD_OUT_SEED), tested[0]),
        steps=steps,
        learning_rate=2e-3,
        metric=frechet_distance,
        measures="Frechet distance of pixels",
        run=AdversarialRun,
    )
