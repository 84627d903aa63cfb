"""The sampler that the APIs of a service ask; behind it is a process of ours, or vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from tlora_megatron.runtime.sampling.values import Answer, Piece, Prompt, gather


class SamplingRefused(ValueError):
    """A request that cannot be met; the sentence is for the one who asked."""


class SamplerUnavailable(RuntimeError):
    """The sampler cannot be started, or has ended twice during a request."""


class SamplerAway(SamplerUnavailable):
    """No server of it answers; the same request can be made again until one does."""


class SamplerBusy(RuntimeError):
    """More requests wait for the sampler than may; the same one can be made again soon."""


class Sampler:
    """Samples from the bases of a service, with adapters; cancel a task to take its request back.

    Every call may raise `SamplingRefused`, `SamplerBusy` and `SamplerUnavailable`.
    """

    def stream(self, base: str, prompts: Sequence[Prompt]) -> AsyncIterator[Piece]:
        """Yields pieces as tokens come; the prompts may have different adapters."""
        raise NotImplementedError

    async def generate(self, base: str, prompts: Sequence[Prompt]) -> list[Answer]:
        """Returns one answer a prompt."""
        return gather(prompts, [piece async for piece in self.stream(base, prompts)])

    async def encode(
        self, base: str, asked: str | Mapping[str, Any], template: str | None = None
    ) -> list[int]:
        """Returns the tokens of a text, or of a chat as `read_asked` returns it.

        What a chat asks for comes next: an assistant's turn is begun.

        Args:
            template: chat template instead of the base's.
        """
        raise NotImplementedError

    async def decode(self, base: str, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, special ones included."""
        raise NotImplementedError

    async def token_texts(self, base: str, tokens: Sequence[int]) -> list[str]:
        """Returns the text of each token alone."""
        raise NotImplementedError

    def check_room(self) -> None:
        """Refuses by `SamplerBusy` while no more requests may wait."""

    async def open(self) -> None:
        """Begins to make ready what runs already; nothing is started."""

    async def close(self) -> None:
        """Ends what was started here."""
        raise NotImplementedError
