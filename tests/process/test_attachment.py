"""Engines that move bytes themselves and start a private manager: one for each deployment, for all of its models."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch", reason="the library copies torch tensors; torch is not installed")

import torch

import kvbm
from kvbm.admin_protocol import Describe, Description
from kvbm.client.admin import Admin
from kvbm.client.channel import Channel
from kvbm.errors import ManagerUnavailable
from kvbm.library.attachment import Attachment
from kvbm.settings import Settings
from rigs.huge_pages import REFUSED, WANTED, advice, advised, needs_huge_pages
from rigs.library import BLOCK_TOKENS, NAMESPACE, content, layout, new_cache

DEADLINE_S = 60.0
SLOTS = 24
TOKENS = list(range(6 * BLOCK_TOKENS))
OTHER = kvbm.Namespace(model="test", fields=(("weights", "2"),))


class Site:
    """Where private managers are started."""

    def __init__(self, directory: Path) -> None:
        self.settings = Settings(runtime_dir=str(directory / "run"), host_blocks=SLOTS, metrics=False)
        self._engines = 0

    def attachment(self, deployment: str, namespaces: int = 1) -> Attachment:
        self._engines += 1
        name = f"{deployment}-{self._engines}"
        return Attachment.of_engine(self.settings, os.environ, deployment, name, namespaces=namespaces)

    def join(
        self, deployment: str, namespace: kvbm.Namespace = NAMESPACE, namespaces: int = 1
    ) -> kvbm.BlockManager:
        """One more rank of a deployment; the first one starts its manager."""
        return kvbm.BlockManager.attach(
            self.attachment(deployment, namespaces), layout(), namespace, DEADLINE_S, DEADLINE_S
        )

    def gone(self, deployment: str) -> bool:
        """Nobody listens for this deployment."""
        try:
            Channel.connect(self.attachment(deployment).address.socket_path).close()
        except ManagerUnavailable:
            return True
        return False


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never happened"


def host_slots(manager: kvbm.BlockManager) -> int:
    tiers = manager.status()["tiers"]
    assert isinstance(tiers, dict)
    host = tiers["host"]
    return int(host["blocks"])


def test_ranks_of_a_deployment_share_the_manager_that_the_first_one_started(site: Site) -> None:
    """It goes with the last of them, and another deployment has one of its own."""
    cache, target = new_cache(1), new_cache(2)
    with site.join("one") as first:
        with site.join("one") as second, site.join("two") as stranger:
            assert first.offload(TOKENS, cache, range(6)) == 6
            with second.match(TOKENS) as hit:
                assert hit.onboard(target, range(10, 16)) == 6
            assert torch.equal(content(target, range(10, 16)), content(cache, range(6)))
            with stranger.match(TOKENS) as hit:
                assert hit.blocks == 0
        until(lambda: site.gone("two"))
        with first.match(TOKENS) as hit:
            assert hit.blocks == 6, "one of its clients is left"
    until(lambda: site.gone("one"))


@needs_huge_pages
@pytest.mark.parametrize(("wanted", "asked"), [(True, WANTED), (False, REFUSED)])
def test_huge_pages_are_asked_for_or_refused_by_the_manager_and_its_clients(
    tmp_path: Path, wanted: bool, asked: str
) -> None:
    left, site = advised(), Site(tmp_path)
    site.settings = msgspec.structs.replace(site.settings, huge_pages=wanted)
    attachment = site.attachment("one")
    with kvbm.BlockManager.attach(attachment, layout(), NAMESPACE, DEADLINE_S, DEADLINE_S):
        with Admin(attachment.address.socket_path, site.settings) as admin:
            manager = admin.ask(Describe(), Description).pid
        assert advice(besides=left) == advice(manager) == {asked}
    until(lambda: site.gone("one"))


def test_a_private_manager_serves_as_many_models_as_it_was_started_for(site: Site) -> None:
    """Each has an equal share; one more finds no room."""
    with site.join("pools", namespaces=2) as target, site.join("pools", OTHER, namespaces=2) as draft:
        assert host_slots(target) == host_slots(draft) == SLOTS // 2
        assert target.offload(TOKENS, new_cache(1), range(6)) == 6
        with draft.match(TOKENS) as hit:
            assert hit.blocks == 0
        third = kvbm.Namespace(model="test", fields=(("weights", "3"),))
        with pytest.raises(kvbm.ManagerRefused, match="cannot be served"):
            site.join("pools", third, namespaces=2)
    with site.join("single") as alone:
        assert host_slots(alone) == SLOTS
    until(lambda: site.gone("pools") and site.gone("single"))


def test_a_manager_that_is_named_is_never_started(site: Site, tmp_path: Path) -> None:
    path = str(tmp_path / "absent.sock")
    settings = Settings(manager=path, runtime_dir=str(tmp_path / "run"), host_blocks=SLOTS)
    attachment = Attachment.of_engine(settings, os.environ, "one", "rank")
    assert (attachment.address.socket_path, attachment.address.private) == (path, False)
    with pytest.raises(kvbm.ManagerUnavailable, match="absent"):
        kvbm.BlockManager.attach(attachment, layout(), NAMESPACE, join_timeout_s=0.0)
    assert not os.path.exists(settings.runtime_dir)
