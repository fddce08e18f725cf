"""The kinds of heads with repositories of their own."""

from __future__ import annotations

from specd.worker.heads import eagle3, marks

KINDS = {marks.EAGLE_3: eagle3.KIND}
