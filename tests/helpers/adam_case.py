"""One adapter's optimizer state beside `torch.optim.AdamW` in fp64 on the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tlora_megatron.ops.adamw import AdamUpdate


class Hyper(NamedTuple):
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


HYPERS = (
    Hyper(1e-2, 0.9, 0.999, 1e-8, 0.1),
    Hyper(3e-3, 0.8, 0.95, 1e-4, 0.0),
    Hyper(1e-1, 0.0, 0.5, 1e-6, 0.01),
    Hyper(0.0, 0.9, 0.999, 1e-8, 0.1),
)
SIZES = (1, 5000, 2048, 777, 4097)
BUFFERS = ("master", "grad", "exp_avg", "exp_avg_sq")
Step = Callable[[Sequence[AdamUpdate]], None]
RELATIVE, ABSOLUTE = 2e-6, 1e-7
"""Share of the largest weight or moment: some roundings of fp32 a step, over a test's steps."""


class AdamCase:
    """A job with random weights and gradients that follow from its seed."""

    def __init__(
        self, seed: int, size: int, device: torch.device, *, hyper: Hyper | None = None
    ) -> None:
        self.seed, self.size, self.device = seed, size, device
        self.hyper = HYPERS[seed % len(HYPERS)] if hyper is None else hyper
        self.generator = torch.Generator().manual_seed(seed)
        self.master = self._draw()
        self.exp_avg = torch.zeros(size, device=device)
        self.exp_avg_sq = torch.zeros(size, device=device)
        self.steps = 0
        self.param = torch.nn.Parameter(self.master.double())
        h = self.hyper
        rest = {"eps": h.eps, "weight_decay": h.weight_decay, "foreach": False}
        self.optimizer = torch.optim.AdamW([self.param], h.lr, (h.beta1, h.beta2), **rest)
        self.grad = torch.zeros(size, device=device)

    def _draw(self) -> torch.Tensor:
        return torch.randn(self.size, generator=self.generator).to(self.device)

    def start_at(self, steps: int) -> None:
        self.steps = steps
        self.exp_avg.copy_(self._draw() * 0.1)
        self.exp_avg_sq.copy_(self._draw().square())
        self.optimizer.state[self.param] = {
            "step": torch.tensor(float(steps)),
            "exp_avg": self.exp_avg.double(),
            "exp_avg_sq": self.exp_avg_sq.double(),
        }

    def update(self, clip: float | torch.Tensor) -> AdamUpdate:
        """The next update, with a new gradient over many magnitudes."""
        self.steps += 1
        self.grad = self._draw() * torch.exp(3 * self._draw())
        return AdamUpdate(
            master=self.master,
            grad=self.grad.clone(),
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            **self.hyper._asdict(),
            step=self.steps,
            clip=clip,
        )

    def step_reference(self, clip: float) -> None:
        self.param.grad = self.grad.double() * clip
        self.optimizer.step()

    def step_within(self, step: Step) -> None:
        """Takes a step on views of longer buffers, off by 20 bytes, and leaves the rest alone."""
        update, own = self.update(1.0), slice(5, 5 + self.size)
        wide = {name: torch.full((self.size + 10,), 7.0, device=self.device) for name in BUFFERS}
        for name, buffer in wide.items():
            buffer[own] = getattr(update, name)
        step([update._replace(**{name: buffer[own] for name, buffer in wide.items()})])
        self.step_reference(1.0)
        for name, buffer in wide.items():
            assert (buffer[: own.start] == 7).all(), name
            assert (buffer[own.stop :] == 7).all(), name
            if name != "grad":
                getattr(self, name).copy_(buffer[own])

    def state(self) -> list[torch.Tensor]:
        return [self.master, self.exp_avg, self.exp_avg_sq]

    def state_equals(self, other: Sequence[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.state(), other, strict=True))

    def compare(self) -> None:
        """Weights and moments are the reference's up to fp32 rounding."""
        state = self.optimizer.state[self.param]
        expected = (self.param.detach(), state["exp_avg"], state["exp_avg_sq"])
        for name, actual, want in zip(
            ("master", "exp_avg", "exp_avg_sq"), self.state(), expected, strict=True
        ):
            torch.testing.assert_close(
                actual.double(),
                want,
                rtol=RELATIVE,
                atol=ABSOLUTE * max(1.0, want.abs().max().item() if want.numel() else 0.0),
                msg=lambda text, name=name: f"{name} of job {self.seed}: {text}",
            )


def take_steps(step: Step, cases: Sequence[AdamCase], count: int, *, tensor_clip: bool) -> None:
    """Steps of all cases together, each with another clip, beside those of torch."""
    for index in range(count):
        clips = [0.1 + 0.2 * ((index + case.seed) % 5) for case in cases]
        updates = [
            case.update(torch.tensor(clip, device=case.device) if tensor_clip else clip)
            for case, clip in zip(cases, clips, strict=True)
        ]
        step(updates)
        for case, clip, update in zip(cases, clips, updates, strict=True):
            assert not update.grad.any()
            case.step_reference(clip)
