"""Jobs whose slots follow one another as one run, and the ends of its blocks as the completion of each job."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm.block import Outcome
from kvbm.tiers.contract import BlockEnd, Completion
from kvbm.tiers.disk.block_io import Buffer, RunBuffers
from kvbm.tiers.disk.threads import Job


def memory_of(jobs: Sequence[Job]) -> RunBuffers:
    """The memory of the run that these jobs are together."""
    if len(jobs) == 1:
        return RunBuffers.of_shards(jobs[0].buffers, jobs[0].count)
    blocks: list[Sequence[Buffer]] = []
    for job in jobs:
        if job.count == 1:
            blocks.append(job.buffers)
        else:
            blocks += RunBuffers.of_shards(job.buffers, job.count).blocks
    return RunBuffers.of_blocks(blocks)


def completions_of(
    jobs: Sequence[Job], blocks: Sequence[BlockEnd], block_bytes: int, seconds: float, error: str
) -> list[Completion]:
    """A completion for each job; `blocks` are the ends of all their blocks, `error` says why some are RETRY."""
    completions, first = list[Completion](), 0
    for job in jobs:
        ends = blocks[first : first + job.count]
        first += job.count
        completions.append(Completion.of(job.job_id, ends, block_bytes, seconds, error))
    return completions


def abandoned(job: Job, error: str, still_in_use: bool) -> Completion:
    """The completion of a job none of whose blocks moved."""
    return Completion.of(job.job_id, [BlockEnd(Outcome.RETRY)] * job.count, 0, 0.0, error, still_in_use)
