"""`python -m target_worker` is `specd target-worker`."""

# Plain imports come first, and this one has to: it sets variables that gRPC reads when it is imported.
import specd.launch
from specd.identity.certificates import check_certificates
from specd.settings import TargetWorkerSettings
from specd.startup_error import StartupError
from specd.supervised import supervisor
from specd.vocabulary import OWN_HEAD
from specd.worker.model.outline import check_directories


def check_models(settings: TargetWorkerSettings) -> None:
    """Raise StartupError if a directory has no model that can be served. A supervisor has checked this already."""
    if supervisor() is None:
        draft = settings.self_draft if settings.self_draft != OWN_HEAD else ""
        check_directories(settings.model, draft, in_target=True)


def check_ranks(settings: TargetWorkerSettings) -> None:
    """Raise StartupError if the worker cannot be one of several ranks."""
    if settings.takes_part and settings.self_draft not in {"", OWN_HEAD}:
        raise StartupError(
            f"wrong settings: self_draft is {settings.self_draft}, but a target with several ranks has no draft of its "
            "own: serve the draft with a draft worker"
        )


specd.launch.launch("target-worker", TargetWorkerSettings, check_certificates, check_ranks, check_models)
