"""`python -m draft_worker` is `specd draft-worker`."""

# Plain imports come first, and this one has to: it sets variables that gRPC reads when it is imported.
import specd.launch
from draft_worker.main import run
from specd.settings import DraftWorkerSettings

specd.launch.launch("draft-worker", DraftWorkerSettings, run)
