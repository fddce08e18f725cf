import torch
import torch.nn as nn
import torch.nn.functional as F


class FeedForward(nn.Module):
    """Two linear layers with a nonlinearity in between."""

    def __init__(self, dim, hidden_dim, dropout=0.1):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = F.gelu(self.fc1(x))
        x = self.dropout(x)
        return self.fc2(x)


class ResidualBlock(nn.Module):
    """Normalize, transform, and add the input back."""

    def __init__(self, dim, hidden_dim, dropout=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.ff = FeedForward(dim, hidden_dim, dropout=dropout)

    def forward(self, x):
        return x + self.ff(self.norm(x))


class MLP(nn.Module):
    """A stack of residual blocks followed by a classifier."""

    def __init__(self, in_dim, dim, num_classes, num_blocks=4, dropout=0.1):
        super().__init__()
        self.embed = nn.Linear(in_dim, dim)
        self.blocks = nn.ModuleList(