"""The models that are stepped: one usual, one of many small tensors, one with a huge tensor."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class BenchmarkModel:
    """A model whose ``forward(*batch)`` returns the loss, and the batches that it takes.

    Attributes:
        summary: what a reader of the results should know.
        build: makes the model, initialised by torch's global generator.
        batch: draws one rank's batch.
    """

    name: str
    summary: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP with biases: 12 tensors."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, in the shape of its input (batch, length, width)."""
        batch, length, width = x.shape
        split = self.qkv(self.norm_1(x)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        mixed: Tensor = self.contract(F.gelu(self.expand(self.norm_2(x))))
        return x + mixed


class LanguageModel(nn.Module):
    """A GPT whose output layer is its token embedding; returns the cross entropy."""

    def __init__(
        self, *, vocabulary: int, length: int, width: int, num_layers: int, num_heads: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.ModuleList(TransformerBlock(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, text: Tensor) -> Tensor:
        """The loss of predicting each token of ``text`` (batch, length + 1) from those before."""
        x = self.tokens(text[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


class SmallMatrices(nn.Module):
    """``h = tanh(h + h @ w)`` once per matrix; returns the mean square."""

    def __init__(self, *, num_layers: int, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.randn(width, width) * 0.1 / width**0.5 for _ in range(num_layers)
        )

    def forward(self, h: Tensor) -> Tensor:
        """The loss for ``h`` (batch, width)."""
        for weight in self.weights:
            h = torch.tanh(h + h @ weight)
        return h.square().mean()


class BagOfTokens(nn.Module):
    """A large embedding under a deep narrow residual network; returns the cross entropy."""

    def __init__(
        self,
        *,
        vocabulary: int,
        embedding_width: int,
        width: int,
        num_layers: int,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocabulary, embedding_width, mode="mean")
        self.enter = nn.Linear(embedding_width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.leave = nn.Linear(width, num_classes)

    def forward(self, bags: Tensor, classes: Tensor) -> Tensor:
        """The loss for ``bags`` of tokens (batch, size) of ``classes`` (batch,)."""
        h = self.enter(self.embedding(bags))
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return F.cross_entropy(self.leave(h), classes)


def _small_matrices(name: str, *, num_layers: int, width: int, batch: int) -> BenchmarkModel:
    return BenchmarkModel(
        name,
        f"h = tanh(h + h @ w) with {num_layers:,} matrices of {width} x {width}; batch {batch}",
        lambda: SmallMatrices(num_layers=num_layers, width=width),
        lambda generator: (torch.randn(batch, width, generator=generator),),
    )


MODELS = {
    model.name: model
    for model in (
        BenchmarkModel(
            "gpt",
            "12 layers, width 384, 6 heads, vocabulary 20,000, tied embedding; batch 2 x 32 tokens",
            lambda: LanguageModel(
                vocabulary=20_000, length=32, width=384, num_layers=12, num_heads=6
            ),
            lambda generator: (torch.randint(20_000, (2, 33), generator=generator),),
        ),
        _small_matrices("many", num_layers=2_000, width=71, batch=4),
        BenchmarkModel(
            "skew",
            "embedding of 78,125 x 256 in bags of 16, then 200 residual layers of width 64; batch 8",
            lambda: BagOfTokens(
                vocabulary=78_125, embedding_width=256, width=64, num_layers=200, num_classes=10
            ),
            lambda generator: (
                torch.randint(78_125, (8, 16), generator=generator),
                torch.randint(10, (8,), generator=generator),
            ),
        ),
        _small_matrices("tiny", num_layers=8, width=128, batch=4),
    )
}
DEFAULT_MODELS = ("gpt", "many", "skew")
