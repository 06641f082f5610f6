"""The model: a small GPT over bytes.

The decoder of GPT-2 without what a demonstration can do without: no biases, no dropout, and one
matrix that both embeds a byte and scores the next one.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # every byte is a token


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a `ByteGPT`.

    Args:
        layers: Number of blocks.
        width: Elements in the vector of one position; a multiple of ``heads``.
        heads: Attention heads per block.
        context: Most bytes the model looks at.
    """

    layers: int
    width: int
    heads: int
    context: int


class ByteGPT(nn.Module):
    """Scores the next byte at every position of a text."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_byte = nn.Embedding(VOCABULARY, config.width)
        self.embed_position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self._initialize_(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the scores of the next byte.

        Args:
            tokens: Bytes as ``int64``, shape ``(batch, length)``, ``length <= context``.

        Returns:
            Logits, shape ``(batch, length, 256)``.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed_byte(tokens) + self.embed_position(positions)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed_byte.weight)

    @torch.no_grad()
    def _initialize_(self, config: ModelConfig) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            # What is added to the residual stream is scaled down by depth (GPT-2).
            depth = (2 * config.layers) ** -0.5 if name.endswith("out.weight") else 1.0
            parameter.normal_(std=0.02 * depth)


class _Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention = _Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.mlp = _MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = mixed + self.mlp(self.mlp_norm(mixed))
        return out


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class _MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.hidden = nn.Linear(config.width, 4 * config.width, bias=False)
        self.out = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(F.gelu(self.hidden(x)))
        return out
