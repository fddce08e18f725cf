"""`python -m draft_worker` is `specd draft-worker`."""

# Plain imports come first, and this one has to: it sets variables that gRPC reads when it is imported.
import specd.launch
from specd.identity.certificates import check_certificates
from specd.settings import DraftWorkerSettings
from specd.supervised import supervisor
from specd.worker.model.outline import check_directories


def check_model(settings: DraftWorkerSettings) -> None:
    """Raise StartupError if a directory has no model that can be served. A supervisor has checked this already."""
    if supervisor() is None:
        check_directories(settings.model)


specd.launch.launch("draft-worker", DraftWorkerSettings, check_certificates, check_model)
