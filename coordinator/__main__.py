"""`python -m coordinator` is `specd coordinator`."""

# Plain imports come first, and this one has to: it sets variables that gRPC reads when it is imported.
import specd.launch
from coordinator.main import run
from specd.settings import CoordinatorSettings

specd.launch.launch("coordinator", CoordinatorSettings, run)
