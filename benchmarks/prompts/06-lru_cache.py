"""A small cache that forgets the least recently used entry."""

from collections import OrderedDict
from threading import RLock


class LRUCache:
    """Mapping with a bounded number of entries.

    Parameters
    ----------
    maxsize : int
        The largest number of entries to keep.
    """

    def __init__(self, maxsize=128):
        if maxsize < 1:
            raise ValueError("maxsize must be positive")
        self.maxsize = maxsize
        self.hits = 0
        self.misses = 0
        self._data = OrderedDict()
        self._lock = RLock()

    def __len__(self):
        return len(self._data)

    def get(self, key, default=None):
        """Return the value stored for key and mark it as used."""
        with self._lock:
            try:
                value = self._data[key]
            except KeyError:
                self.misses += 1
                return default
            self._data.move_to_end(key)
            self.hits += 1
            return value

    def put(self, key, value):
        """Store a value, dropping the oldest entry when the cache is full."""
        with self._lock:
            self._data[key] = value