"""What the latest requests asked for, what was found, and why the rest was not: the memory behind `kvbm why`.

Bounded: the last `REQUESTS_MAX` requests (about 1 KB each) and `PROMPTS_MAX` beginnings of prompts. It starts empty
with each life of the manager.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvbm.admin_protocol import WhyReply
from kvbm.block import KEY_BYTES, BlockKey, Tier
from kvbm.clock import Clock
from kvbm.hints import Verdict
from kvbm.layout import Namespace
from kvbm.manager.lost import NO_FATES, STORE_OFF, Fates, behind_a_fault, fates, reason_of
from kvbm.manager.space import Space
from kvbm.protocol import UNLOADED_REASONS, Lookup, Release

REQUESTS_MAX = 4096
PROMPTS_MAX = 4096
VARIANTS_MAX = 4
"""So many namespaces, adapters or salts are remembered for one beginning of a prompt."""
NAMES_MAX = 8
"""A request that is preempted or waits is looked up again; of so many of its lookups the end is followed."""
EXTRAS_MAX = 16
HINT_PARTS_MAX = 16
TEXT_MAX = 200

UNAVAILABLE = "unavailable"
MODEL_CHANGED = "model_changed"
EXTRAS_CHANGED = {"adapter": "adapter_changed", "weights": "weights_changed", "cache_salt": "salt_changed"}
OTHER_EXTRAS = "extras_changed"
NEVER_SEEN = "never_seen"
NO_BOUNDARY = "no_state_at_boundary"
UNLOADED = {"cost": "recompute_cheaper", "deadline": "promotion_too_late", "failed": "copy_failed"}
"""How the leader's reasons not to load what was found are called here; the others keep their names."""


@dataclass(slots=True)
class Request:
    """One request: of its `blocks`, the first `on_device` were on the device; the others as they were looked up last.

    `missing` counts the blocks that were in no tier by reason, and `unloaded` those that were found and computed. The
    leader has said what became of its latest lookup once that is `over`. `hint` has a line for each part of what its
    client said.
    """

    request: str
    at_s: float
    model: str = ""
    namespace: str = ""
    block_tokens: int = 0
    blocks: int = 0
    on_device: int = 0
    host: int = 0
    disk: int = 0
    remote: int = 0
    cut: int = 0
    loaded: int = 0
    lookups: int = 0
    over: bool = False
    missing: dict[str, int] = field(default_factory=dict)
    unloaded: Counter[str] = field(default_factory=Counter)
    left: Fates = NO_FATES
    forgotten: bool = False
    policy: str = ""
    tiers: tuple[str, ...] = ()
    differs: list[str] = field(default_factory=list)
    names: list[tuple[int, int]] = field(default_factory=list)
    hint: list[str] = field(default_factory=list)

    @property
    def found(self) -> int:
        """Blocks that were found in a tier, also those that host memory had no room to bring up."""
        return self.host + self.disk + self.remote + self.cut

    @property
    def unneeded(self) -> int:
        """Blocks that were found, neither loaded nor computed: another request had them loaded first, or it ended."""
        return max(0, self.found - self.loaded - sum(self.unloaded.values())) if self.over else 0


class Held(NamedTuple):
    """Of a chain's leading `blocks` that are held, `host` lie in host memory, `remote` in a remote tier only, and the
    others on disk.

    In host memory alone the chain reaches to `host_prefix`, on disk alone to `disk_prefix`, and so on. With several
    groups these are boundaries, and `full` leading blocks are held, as far as all tokens go.
    """

    blocks: int = 0
    host: int = 0
    host_prefix: int = 0
    disk_prefix: int = 0
    full: int = 0
    remote: int = 0
    remote_prefix: int = 0


class _Variant(NamedTuple):
    """A prompt as it was asked for: in this namespace, with these extras, its first block has this key."""

    first: BlockKey
    namespace: Namespace
    extras: dict[str, str]


class History:
    """The latest requests of all engines. Owned by the manager's thread."""

    def __init__(self, clock: Clock, namespace_of: Callable[[Space], Namespace]) -> None:
        self._clock = clock
        self._namespace_of = namespace_of
        self._since_s = clock()
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self._by_name: dict[tuple[int, int], Request] = {}
        self._prompts: OrderedDict[bytes, list[_Variant]] = OrderedDict()
        # Of all requests so far: blocks that were computed, by reason, and those that were asked for.
        self._reasons: Counter[str] = Counter()
        self._asked_blocks = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def prompt_count(self) -> int:
        """Beginnings of prompts that are remembered, with each of their variants."""
        return sum(map(len, self._prompts.values()))

    def unavailable(self, owner: int, message: Lookup) -> None:
        """The lookup came while a rank of its engine was missing: nothing could be found."""
        asked = self._asked(owner, message)
        asked.blocks, asked.on_device = len(message.keys) // KEY_BYTES, message.skip
        asked.missing = {UNAVAILABLE: asked.blocks - message.skip}
        self._count(asked)

    def looked_up(
        self,
        owner: int,
        message: Lookup,
        keys: Sequence[BlockKey],
        space: Space,
        sources: bytes,
        cut: int,
        full: int = 0,
    ) -> str:
        """A lookup found blocks in these tiers, and `cut` more that it could not lease. With several groups the first
        `full` blocks are held, as far as all tokens go.

        Returns why it found nothing, one of `MISSED_REASONS`; empty where it found something, or asked for nothing.
        """
        asked, namespace = self._asked(owner, message), self._namespace_of(space)
        _note_place(asked, space, namespace)
        asked.blocks, asked.on_device = len(keys), message.skip
        asked.host, asked.disk, asked.cut = sources.count(Tier.HOST), sources.count(Tier.DISK), cut
        asked.remote = sources.count(Tier.REMOTE)
        asked.over = False
        asked.missing, asked.differs = {}, []
        asked.left = NO_FATES
        first = message.skip + asked.found
        if first < full:
            asked.missing[NO_BOUNDARY], first = full - first, full
        if first < len(keys):
            self._explain(asked, message.prompt, message.extras, keys, first, space, namespace)
        self._count(asked)
        if message.prompt and keys:
            self._remember(message.prompt, _Variant(keys[0], namespace, _bounded(message.extras)))
        return "" if asked.found else next(iter(asked.missing), "")

    def heard(self, owner: int, lookup: int, verdicts: Sequence[Verdict]) -> None:
        """What became of the parts of what the client of a lookup said."""
        asked = self._by_name.get((owner, lookup))
        if asked is not None and verdicts:
            asked.hint = [
                " ".join(filter(None, (part, outcome.value, f"({reason})" if reason else "")))
                for part, outcome, reason, _ in verdicts[:HINT_PARTS_MAX]
            ]

    def released(self, owner: int, message: Release, loaded: int) -> None:
        """The leader says what became of the blocks that a lookup found; `loaded` of the prompt's were loaded."""
        asked = self._by_name.get((owner, message.lookup))
        if asked is not None:
            asked.over = True
            asked.loaded += loaded
            for reason, blocks in message.unloaded.items():
                if reason in UNLOADED_REASONS:
                    name = UNLOADED.get(reason, reason)
                    asked.unloaded[name] += max(0, blocks)
                    self._reasons[name] += max(0, blocks)

    def reply(self, wanted: str, limit: int) -> WhyReply:
        """The requests that are called so, or all for an empty text: the newest `limit` of them, newest first.

        An engine may append a mark of its own to the id of its client: `-` and 8 characters. A prefix is enough.
        """
        wanted = _plain(wanted)
        if wanted in self._requests:
            names = [wanted]
        else:
            whole = [name for name in self._requests if wanted and name[:-9] == wanted and name[-9:-8] == "-"]
            names = whole or [name for name in self._requests if name.startswith(wanted)]
        chosen = [self._requests[name] for name in reversed(names)]
        now_s = self._clock()
        return WhyReply(
            seconds=now_s - self._since_s,
            kept=REQUESTS_MAX,
            matching=len(chosen),
            requests=tuple(_described(asked, now_s) for asked in chosen[: max(0, limit)]),
            reasons={reason: blocks for reason, blocks in self._reasons.most_common() if blocks},
            asked_blocks=self._asked_blocks,
        )

    def explained(self, prompt: bytes, keys: Sequence[BlockKey], space: Space, held: Held) -> WhyReply:
        """Of a chain that nobody asked for now: what is held, and why the rest is not. Nothing is counted."""
        asked, namespace = Request("", self._clock()), self._namespace_of(space)
        _note_place(asked, space, namespace)
        asked.blocks, asked.host, asked.remote = len(keys), held.host, held.remote
        asked.disk = held.blocks - held.host - held.remote
        first = held.blocks
        if first < held.full:
            asked.missing[NO_BOUNDARY], first = held.full - first, held.full
        if first < len(keys):
            self._explain(asked, prompt, {}, keys, first, space, namespace)
            if OTHER_EXTRAS in asked.missing and not asked.differs:
                # The keys of a request with the same extras are others: these are in a form that is not the engine's.
                asked.missing = {NEVER_SEEN: asked.missing[OTHER_EXTRAS]}
        reach = {"host": held.host_prefix, "disk": held.disk_prefix, "remote": held.remote_prefix}
        described = {
            **_described(asked, self._clock()),
            "prefix": {tier: reach[tier] for tier in asked.tiers},
        }
        return msgspec.structs.replace(self.no_answer(), matching=1, requests=(described,))

    def no_answer(self) -> WhyReply:
        """About nothing that is known."""
        return WhyReply(
            seconds=self._clock() - self._since_s,
            kept=REQUESTS_MAX,
            matching=0,
            requests=(),
            reasons={},
            asked_blocks=0,
        )

    def _count(self, asked: Request) -> None:
        self._reasons.update(asked.missing)
        self._asked_blocks += asked.blocks

    def _asked(self, owner: int, message: Lookup) -> Request:
        name = _plain(message.request) or f"lookup {message.lookup}"
        asked = self._requests.pop(name, None) or Request(name, 0.0)
        self._requests[name] = asked
        # It is counted as it was looked up last.
        self._reasons.subtract(asked.missing)
        self._asked_blocks -= asked.blocks
        asked.at_s = self._clock()
        asked.lookups += 1
        asked.names.append((owner, message.lookup))
        self._by_name[owner, message.lookup] = asked
        if len(asked.names) > NAMES_MAX:
            self._by_name.pop(asked.names.pop(0), None)
        if len(self._requests) > REQUESTS_MAX:
            _, oldest = self._requests.popitem(last=False)
            for each in oldest.names:
                self._by_name.pop(each, None)
        return asked

    def _explain(
        self,
        asked: Request,
        prompt: bytes,
        extras: dict[str, str],
        keys: Sequence[BlockKey],
        first: int,
        space: Space,
        namespace: Namespace,
    ) -> None:
        """Why the blocks from number `first` on were in no tier."""
        if away := behind_a_fault(space, keys[first:]):
            asked.missing[STORE_OFF], first = away, first + away
            if first == len(keys):
                return
        why = space.departed.missing(keys[first:])
        if why.first:
            asked.left = fates(space, why)
            asked.missing[reason_of(asked.left)] = why.first
        if why.unknown:
            reason = NEVER_SEEN
            if first == 0:
                reason = self._same_prompt(asked, prompt, extras, keys[0], namespace) or NEVER_SEEN
            asked.missing[reason] = why.unknown

    def _same_prompt(
        self, asked: Request, prompt: bytes, extras: dict[str, str], first: BlockKey, namespace: Namespace
    ) -> str:
        """The reason where the same tokens were asked for under another key or elsewhere; empty where they were not."""
        known = self._prompts.get(prompt, ())
        extras = _bounded(extras)
        for variant in reversed(known):
            if variant.namespace.fingerprint == namespace.fingerprint and variant.first != first:
                names = [
                    name
                    for name in sorted({*extras, *variant.extras})
                    if extras.get(name) != variant.extras.get(name)
                ]
                asked.differs = [
                    f"{name} is {extras.get(name, 'none')} here, {variant.extras.get(name, 'none')} there"
                    for name in names
                ]
                return EXTRAS_CHANGED.get(names[0], OTHER_EXTRAS) if len(names) == 1 else OTHER_EXTRAS
        others = [each for each in known if each.namespace.fingerprint != namespace.fingerprint]
        if not others:
            return ""
        ours, theirs = dict(namespace.fields), dict(others[-1].namespace.fields)
        asked.differs = [
            f"{name} is {ours.get(name, 'none')} here, {theirs.get(name, 'none')} there"[:TEXT_MAX]
            for name in {**ours, **theirs}
            if ours.get(name) != theirs.get(name)
        ]
        return MODEL_CHANGED

    def _remember(self, prompt: bytes, variant: _Variant) -> None:
        variants = self._prompts.pop(prompt, [])
        self._prompts[prompt] = variants
        same = variant.first, variant.namespace.fingerprint
        others = [known for known in variants if (known.first, known.namespace.fingerprint) != same]
        variants[:] = others[1 - VARIANTS_MAX :]
        variants.append(variant)
        if len(self._prompts) > PROMPTS_MAX:
            self._prompts.popitem(last=False)


def _note_place(asked: Request, space: Space, namespace: Namespace) -> None:
    asked.model, asked.namespace = namespace.model, namespace.short
    asked.block_tokens, asked.policy = space.layout.block_tokens, space.options.eviction
    asked.tiers, asked.forgotten = tuple(space.tiers()), space.departed.forgotten


def _described(asked: Request, now_s: float) -> dict[str, object]:
    left = {
        tier: {"what": fate.what, "seconds_ago": now_s - fate.at_s}
        for tier, fate in asked.left._asdict().items()
        if fate is not None
    }
    found = asked.on_device + asked.found
    return {
        "request": asked.request,
        "seconds_ago": now_s - asked.at_s,
        "model": asked.model,
        "namespace": asked.namespace,
        "block_tokens": asked.block_tokens,
        "blocks": asked.blocks,
        "device": asked.on_device,
        "host": asked.host,
        "disk": asked.disk,
        "remote": asked.remote,
        "no_room": asked.cut,
        "first_missing": found if found < asked.blocks else None,
        "missing": asked.missing,
        "left": left,
        "differs": asked.differs,
        "loaded": asked.loaded,
        "unloaded": dict(asked.unloaded),
        "unneeded": asked.unneeded,
        "lookups": asked.lookups,
        "eviction_policy": asked.policy,
        "tiers": list(asked.tiers),
        "history_complete": not asked.forgotten,
        "hint": asked.hint,
    }


def _bounded(extras: dict[str, str]) -> dict[str, str]:
    return {_plain(name): _plain(value) for name, value in list(extras.items())[:EXTRAS_MAX]}


def _plain(text: str) -> str:
    """A client chooses a request's id: what would steer a terminal is left out of it."""
    return "".join(char if char.isprintable() else "?" for char in text[:TEXT_MAX])
