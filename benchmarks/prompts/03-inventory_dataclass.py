"""Records for the stock kept in a warehouse."""

from dataclasses import dataclass, field
from typing import List, Optional


@dataclass(frozen=True)
class Item:
    """A single article that can be ordered."""

    sku: str
    name: str
    price: float
    weight: Optional[float] = None


@dataclass
class Shelf:
    """A numbered shelf holding a limited number of items."""

    number: int
    capacity: int = 20
    items: List[Item] = field(default_factory=list)

    def add(self, item: Item) -> None:
        """Put an item on the shelf."""
        if len(self.items) >= self.capacity:
            raise ValueError(f"shelf {self.number} is full")
        self.items.append(item)

    def remove(self, sku: str) -> Item:
        """Take the first item with the given sku off the shelf."""
        for index, item in enumerate(self.items):