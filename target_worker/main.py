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
    from specd.v1 import target_pb2_grpc
    from specd.worker.main import run_worker
    from specd.worker.model.calibration import VERIFIES
    from target_worker.service import TargetService
    from target_worker.verification import rehearse

    await run_worker(
        settings,
        process=Role.TARGET_WORKER,
        service_name="specd.v1.TargetService",
        blas=blas,
        workload=VERIFIES,
        rehearse=rehearse,
        add_service=lambda worker, server: target_pb2_grpc.add_TargetServiceServicer_to_server(
            TargetService(worker), server
        ),
        self_draft=settings.self_draft if not settings.takes_part else "",
        ranks=settings if settings.takes_part else None,
    )
