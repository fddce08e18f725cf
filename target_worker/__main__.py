"""`python -m target_worker` is `specd target-worker`."""

# Plain imports come first, and this one has to: it sets variables that gRPC reads when it is imported.
import specd.launch
from specd.settings import TargetWorkerSettings
from target_worker.main import run

specd.launch.launch("target-worker", TargetWorkerSettings, run)
