"""A small encoder for sequences of tokens.

The modules in this file are kept independent of each other so that they can be
reused. All of them expect the batch to come first: the shape of the inputs is
``(batch, length, dim)`` unless noted otherwise.
"""

import math
from typing import Dict, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


class PositionalEncoding(nn.Module):
    """Add fixed sine and cosine waves to the embeddings.

    Args:
        dim (int): size of the embeddings, must be even.
        max_len (int): length of the longest sequence. Default: 512
        dropout (float): dropout probability. Default: 0.1
    """

    def __init__(self, dim: int, max_len: int = 512, dropout: float = 0.1) -> None:
        super().__init__()
        if dim % 2 != 0:
            raise ValueError(f"dim must be even, got {dim}")
        position = torch.arange(max_len).unsqueeze(1)
        frequency = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
        table = torch.zeros(max_len, dim)
        table[:, 0::2] = torch.sin(position * frequency)
        table[:, 1::2] = torch.cos(position * frequency)
        self.register_buffer("table", table)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.table[: x.size(1)])


class SelfAttention(nn.Module):
    """Scaled dot product attention with several heads.

    Args:
        dim (int): size of the inputs and outputs.
        num_heads (int): number of heads, must divide ``dim``.
        dropout (float): dropout probability of the weights. Default: 0.1
        bias (bool): whether the projections have a bias. Default: ``True``
    """

    def __init__(
        self, dim: int, num_heads: int, dropout: float = 0.1, bias: bool = True
    ) -> None:
        super().__init__()
        if dim % num_heads != 0:
            raise ValueError(f"dim ({dim}) must be divisible by {num_heads}")
        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim ** -0.5
        self.q_proj = nn.Linear(dim, dim, bias=bias)
        self.k_proj = nn.Linear(dim, dim, bias=bias)
        self.v_proj = nn.Linear(dim, dim, bias=bias)
        self.out_proj = nn.Linear(dim, dim, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the projections."""
        for proj in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(proj.weight)
            if proj.bias is not None:
                nn.init.zeros_(proj.bias)

    def _split_heads(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        x = x.view(batch, length, self.num_heads, self.head_dim)
        return x.transpose(1, 2)

    def _merge_heads(self, x: Tensor) -> Tensor:
        batch, _, length, _ = x.shape
        return x.transpose(1, 2).reshape(batch, length, self.dim)

    def forward(
        self, x: Tensor, mask: Optional[Tensor] = None
    ) -> Tuple[Tensor, Tensor]:
        """Attend to every position that is not masked.

        Args:
            x: inputs of shape ``(batch, length, dim)``.
            mask: boolean tensor of shape ``(batch, length)``, true where the
                input is padding.

        Returns:
            The outputs of shape ``(batch, length, dim)`` and the attention
            weights of shape ``(batch, num_heads, length, length)``.
        """
        q = self._split_heads(self.q_proj(x))
        k = self._split_heads(self.k_proj(x))
        v = self._split_heads(self.v_proj(x))

        scores = torch.matmul(q, k.transpose(-2, -1)) * self.scale
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None, :], float("-inf"))
        weights = F.softmax(scores, dim=-1)
        out = torch.matmul(self.dropout(weights), v)
        return self.out_proj(self._merge_heads(out)), weights

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_heads={self.num_heads}"


class EncoderLayer(nn.Module):
    """Self attention and a feed forward network, each with a residual.

    Args:
        dim (int): size of the inputs and outputs.
        num_heads (int): number of attention heads.
        hidden_dim (int): size of the hidden layer.
        dropout (float): dropout probability. Default: 0.1
    """

    def __init__(
        self, dim: int, num_heads: int, hidden_dim: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, num_heads, dropout=dropout)
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        out, _ = self.attention(self.norm1(x), mask=mask)
        x = x + self.dropout1(out)
        out = self.fc2(F.relu(self.fc1(self.norm2(x))))
        x = x + self.dropout2(out)
        return x


class Encoder(nn.Module):
    """Embed tokens and pass them through a stack of layers.

    Args:
        vocab_size (int): number of different tokens.
        dim (int): size of the embeddings. Default: 256
        num_layers (int): number of layers. Default: 4
        num_heads (int): number of attention heads. Default: 4
        max_len (int): length of the longest sequence. Default: 512
        dropout (float): dropout probability. Default: 0.1
        padding_idx (int): index of the padding token. Default: 0
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int = 256,
        num_layers: int = 4,
        num_heads: int = 4,
        max_len: int = 512,
        dropout: float = 0.1,
        padding_idx: int = 0,
    ) -> None:
        super().__init__()
        self.padding_idx = padding_idx
        self.embedding = nn.Embedding(vocab_size, dim, padding_idx=padding_idx)
        self.position = PositionalEncoding(dim, max_len=max_len, dropout=dropout)
        self.layers = nn.ModuleList(
            [
                EncoderLayer(dim, num_heads, 4 * dim, dropout=dropout)
                for _ in range(num_layers)
            ]
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Encode a batch of token indices of shape ``(batch, length)``."""
        mask = tokens == self.padding_idx
        x = self.embedding(tokens)
        x = self.position(x)
        for layer in self.layers: