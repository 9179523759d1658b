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
        if job.is_run:
            ends = blocks[first : first + job.count]
            first += job.count
            completions.append(_of_run(job.job_id, ends, block_bytes, seconds, error))
            continue
        outcome, corrupt, engine_hash, group, _ = blocks[first]
        first += 1
        completions.append(
            Completion(
                job_id=job.job_id,
                outcome=outcome,
                bytes_moved=block_bytes if outcome is Outcome.HIT else 0,
                seconds=seconds,
                corrupt=corrupt,
                error=error if outcome is Outcome.RETRY else "",
                engine_hash=engine_hash,
                group=group,
            )
        )
    return completions


def _of_run(
    job_id: int, ends: Sequence[BlockEnd], block_bytes: int, seconds: float, error: str
) -> Completion:
    missed = [end for end in ends if end.outcome is not Outcome.HIT]
    return Completion(
        job_id=job_id,
        outcome=missed[0].outcome if missed else Outcome.HIT,
        bytes_moved=(len(ends) - len(missed)) * block_bytes,
        seconds=seconds,
        corrupt=any(end.corrupt for end in missed),
        error=error if any(end.outcome is Outcome.RETRY for end in missed) else "",
        blocks=ends,
    )


def abandoned(job: Job, error: str, still_in_use: bool) -> Completion:
    """The completion of a job none of whose blocks moved."""
    return Completion(
        job_id=job.job_id,
        outcome=Outcome.RETRY,
        error=error,
        still_in_use=still_in_use,
        blocks=[BlockEnd(Outcome.RETRY)] * job.count if job.is_run else (),
    )
