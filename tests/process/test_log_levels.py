"""`DYN_LOG` in the forms that the guides name, for a manager of its own and for the part inside an engine."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.rigs.admin import Node
from tests.rigs.leader import Bench
from tests.rigs.manager import KEYS

from kvbm.observe.log import configure
from kvbm.settings import load_settings

OFFLOADING = f"Offloading block with sequence hash {KEYS[0].hex()} to target pool."
MATCHED = "successfully matched 1 host blocks and 0 disk blocks; 1 total blocks"
ONBOARDING = "Onboarding 5 blocks to target pool."

FORMS = [("debug", True), ("info,kvbm=debug", True), ("debug,kvbm=info", False)]


@pytest.mark.parametrize(("form", "shown"), FORMS)
def test_a_manager_writes_what_it_was_asked_for(tmp_path: Path, form: str, shown: bool) -> None:
    log = tmp_path / "manager.log"
    node = Node(tmp_path, log_level=form)
    with log.open("w") as stream:
        engine = node.engine(node.manage(stderr=stream))
        engine.store(KEYS[:1])
        node.close()
    text = log.read_text()
    assert [OFFLOADING in text, MATCHED in text] == [shown, shown], text
    assert ("level=debug logger=kvbm.moves" in text) == shown


@pytest.fixture
def kvbm_logger() -> Iterator[None]:
    logger = logging.getLogger("kvbm")
    kept = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = kept[0], kept[2]
    logger.setLevel(kept[1])


@pytest.mark.parametrize(("form", "shown"), FORMS)
def test_the_part_inside_an_engine_does_too(kvbm_logger: None, form: str, shown: bool) -> None:
    stream = io.StringIO()
    configure(load_settings({"DYN_LOG": form}).settings.log_level, stream)
    bench = Bench()
    bench.load(5)
    bench.leader.close()
    bench.manager.close()
    assert (ONBOARDING in stream.getvalue()) == shown
