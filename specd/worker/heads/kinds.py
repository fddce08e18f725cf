"""The kinds of heads with repositories of their own."""

from __future__ import annotations

from specd.worker.heads import eagle3, gemma_assistant, marks
from specd.worker.heads.dflash import head as dflash

KINDS = {
    marks.EAGLE_3: eagle3.KIND,
    marks.DFLASH: dflash.KIND,
    marks.GEMMA_ASSISTANT: gemma_assistant.KIND,
}
