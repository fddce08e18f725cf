"""Run coroutines with a limit on how many are active at once."""

import asyncio
import logging

logger = logging.getLogger(__name__)


class WorkerPool:
    """A fixed number of workers taking jobs from a queue."""

    def __init__(self, size, *, timeout=None):
        self.size = size
        self.timeout = timeout
        self._queue = asyncio.Queue()
        self._tasks = []

    async def __aenter__(self):
        for index in range(self.size):
            task = asyncio.create_task(self._work(index))
            self._tasks.append(task)
        return self

    async def __aexit__(self, exc_type, exc, tb):
        await self._queue.join()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def submit(self, func, *args):
        """Add a job to the queue."""
        await self._queue.put((func, args))

    async def _work(self, index):
        while True:
            func, args = await self._queue.get()
            try:
                await asyncio.wait_for(func(*args), self.timeout)
            except asyncio.TimeoutError:
                logger.warning("worker %d: job timed out",