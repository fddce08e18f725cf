"""The kinds of heads with repositories of their own."""

from __future__ import annotations

from specd.worker.heads import eagle3, gemma_assistant, marks

KINDS = {marks.EAGLE_3: eagle3.KIND, marks.GEMMA_ASSISTANT: gemma_assistant.KIND}
