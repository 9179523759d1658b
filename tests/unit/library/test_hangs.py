"""A copy of the library that never ends: the memory that it may still write is given to nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the library copies torch tensors; torch is not installed")

from kvbm.errors import CopyHung
from kvbm.transfer import CpuCopier
from rigs.library import BLOCK_TOKENS, LocalHouse, SharedHouse, new_cache

TOKENS = list(range(2 * BLOCK_TOKENS))


@pytest.mark.parametrize("kind", [LocalHouse, SharedHouse])
def test_slots_that_a_store_may_still_write_stay_reserved(
    kind: type[LocalHouse | SharedHouse], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(*_: object) -> None:
        raise CopyHung("copies have not ended")

    def filling() -> int:
        return house.with_space(lambda space: space.host_pool.counts().filling)

    house = kind(tmp_path)
    monkeypatch.setattr(CpuCopier, "store", hangs)
    with house.open() as manager:
        with pytest.raises(CopyHung):
            manager.offload(TOKENS, new_cache(1), range(2))
        with manager.match(TOKENS) as hit:
            assert hit.blocks == 0
        assert filling() == 2
        if isinstance(house, SharedHouse):
            session = manager.backend._session  # type: ignore[attr-defined]
            assert manager.offload(TOKENS, new_cache(1), range(2)) == 0, "nothing is asked any more"
            manager.close()
            assert filling() == 2, "the process may live on, and the copy with it"
            session._worker.close()
    house.close()
