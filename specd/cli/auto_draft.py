"""The draft of `specd up` where its settings leave the choice to specd: `--draft auto`."""

from __future__ import annotations

import contextlib
from pathlib import PurePath

import structlog
from rich.console import Console

from specd.cli.pairs.choice import DraftChoice
from specd.cli.pairs.chooser import DraftChooser
from specd.settings import TargetWorkerSettings
from specd.startup_error import StartupError
from specd.up_settings import UpSettings

log = structlog.get_logger()


class AutoDraft:
    """The choice of a draft for a `specd up`: remembered, or measured once the settings have been checked."""

    def __init__(self, settings: UpSettings) -> None:
        """Begin with the remembered choice, if there is one. `settings` are then those with it."""
        self.settings = settings
        self.choice: DraftChoice | None = None
        self._chooser: DraftChooser | None = None
        # A draft in the target worker's own settings has priority.
        if settings.chooses_draft and not TargetWorkerSettings.is_given("self_draft"):
            self._chooser = DraftChooser(settings.target, settings.draft_directories, targets=settings.targets)
            self._take(self._chooser.recall())

    @property
    def is_open(self) -> bool:
        """Whether the choice is still to be made, by `measure`."""
        return self._chooser is not None and self.choice is None

    def measure(self, console: Console | None) -> bool:
        """Choose among the models on this machine, after trials of the new ones, and return whether one changes.

        `console` shows the progress, None logs it. A failure leaves the settings as they are.
        """
        chooser = self._chooser
        assert chooser is not None
        if not chooser.is_here:
            log.info("the next start can choose a draft, when the target's files are here", target=self.settings.target)
            return False
        before = self.settings.draft
        name = PurePath(self.settings.target).name
        showing = console.status("looking for drafts") if console is not None else contextlib.nullcontext()
        with showing as status:

            def tell(model: str) -> None:
                if status is not None:
                    status.update(f"measuring once which draft is best for {name}: {model}")
                log.info("measuring which draft is best", target=name, model=model)

            try:
                self._take(chooser.choose(chooser.find().fitting, tell))
            except StartupError as error:
                log.warning("cannot choose a draft, so the target has none but its own head", error=str(error))
        return self.settings.draft != before

    def _take(self, choice: DraftChoice | None) -> None:
        self.choice = choice
        if choice is not None and choice.ranked:
            self.settings = self.settings.with_draft(choice.setting)
            log.info("chose the draft", draft=self.settings.draft, choice=choice.in_words)
