"""The target worker process."""

from __future__ import annotations

from specd.identity.roles import Role
from specd.settings import TargetWorkerSettings
from specd.worker.cpu.openblas import load_blas


async def run(settings: TargetWorkerSettings) -> None:
    """Run the target worker until a signal. Raises StartupError when it cannot start."""
    blas = load_blas(settings.blas_threads)

    # MLX comes in here, after its BLAS.
    from specd.worker.ranks.follower import run_follower

    if settings.follow:
        await run_follower(settings, blas=blas)
        return
    from specd.worker.main import run_worker
    from specd.worker.model.calibration import VERIFIES
    from target_worker.service import add_services
    from target_worker.verification import rehearse

    await run_worker(
        settings,
        process=Role.TARGET_WORKER,
        service_name="specd.v1.TargetService",
        blas=blas,
        workload=VERIFIES,
        rehearse=rehearse,
        add_services=add_services,
        self_draft=settings.self_draft if not settings.takes_part else "",
        ranks=settings if settings.takes_part else None,
    )
