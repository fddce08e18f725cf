"""The draft worker process."""

from __future__ import annotations

from specd.identity.roles import Role
from specd.settings import DraftWorkerSettings
from specd.worker.cpu.openblas import load_blas


async def run(settings: DraftWorkerSettings) -> None:
    """Run the draft worker until a signal. Raises StartupError when it cannot start."""
    blas = load_blas(settings.blas_threads)

    # MLX comes in here, after its BLAS.
    from draft_worker.service import add_services
    from specd.worker.main import run_worker
    from specd.worker.model.calibration import PROPOSALS
    from specd.worker.session.proposal import rehearse

    await run_worker(
        settings,
        process=Role.DRAFT_WORKER,
        service_name="specd.v1.DraftService",
        blas=blas,
        workload=PROPOSALS,
        rehearse=rehearse,
        add_services=add_services,
    )
