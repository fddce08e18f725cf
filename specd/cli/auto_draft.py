"""The draft of `specd up` where its settings leave the choice to specd: `--draft auto`."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import structlog
from rich.console import Console

from specd.cli.pairs.choice import DraftChoice
from specd.cli.pairs.chooser import DraftChooser
from specd.model_info import short_name_of
from specd.settings import TargetWorkerSettings
from specd.startup_error import StartupError
from specd.up_settings import UpSettings
from specd.worker.model.directory import bars_that_tell, download
from specd.worker.model.outline import Outline

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
            self._chooser = self._new_chooser()
            with contextlib.suppress(StartupError):  # the checks of the settings report it, with all other problems
                self._take(self._chooser.recall())

    @property
    def is_open(self) -> bool:
        """Whether the choice is still to be made, by `measure`."""
        return self._chooser is not None and self.choice is None

    def measure(self, target: Outline, console: Console | None) -> bool:
        """Choose among the models on this machine, after trials of the new ones, and return whether a setting changes.

        A repository is downloaded first, if a model here has the tokens of `target`. `console` shows the progress, None
        logs it. A failure leaves the settings as they are.
        """
        before = self.settings.draft
        name = short_name_of(self.settings.target)
        showing = console.status("looking for drafts") if console is not None else contextlib.nullcontext()
        with _interruptible(), showing as status:

            def show(text: str) -> None:
                if status is not None:
                    status.update(text)

            def tell(model: str) -> None:
                show(f"measuring once which draft is best for {name}: {model}")
                log.info("measuring which draft is best", target=name, model=model)

            try:
                chooser = self._with_files(target, show)
                if chooser is not None:
                    self._take(chooser.choose(chooser.find().fitting, tell))
            except StartupError as error:
                log.warning("cannot choose a draft, so the target has none but its own head", error=str(error))
        return self.settings.draft != before

    def _with_files(self, target: Outline, show: Callable[[str], None]) -> DraftChooser | None:
        """Return a chooser for the target's files, after their download; None if no model here has the same tokens."""
        assert self._chooser is not None
        if self._chooser.is_here:
            return self._chooser
        if not self._chooser.has_tokens_of(target):
            return None
        name = self.settings.target
        log.info("downloading the target, to choose a draft for it", target=name)
        bars = bars_that_tell(lambda done, total: show(f"downloading {name}: {done / 1e9:.2f} of {total / 1e9:.2f} GB"))
        try:
            download(name, bars=bars)
        except Exception as error:  # the hub client has dozens of error types
            raise StartupError(f"the download of {name} has failed: {error}") from error
        return self._new_chooser()

    def _new_chooser(self) -> DraftChooser:
        settings = self.settings
        return DraftChooser(
            settings.target,
            settings.draft_directories,
            targets=settings.targets,
            heads=not settings.target_adapters,  # a head knows the states of the model alone
        )

    def _take(self, choice: DraftChoice | None) -> None:
        self.choice = choice
        if choice is not None and choice.ranked:
            self.settings = self.settings.with_draft(choice.setting, in_target=choice.is_in_target)
            log.info("chose the draft", draft=self.settings.draft, choice=choice.in_words)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end this process as it would by default, after the terminal has its cursor again.

    Beside the main thread, which has the signals, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
