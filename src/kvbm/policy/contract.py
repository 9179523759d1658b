"""The contracts of policies, as a tier calls them.

Called by the one thread that owns the tier; never blocks, does no I/O, reads no clock: time comes as an argument
(seconds, never going back). Slots are numbers below `slot_count`; `NO_SLOT` (-1) stands for "not here". A key
stands for the whole chain up to its block: it is a `BlockKey` in the manager, a number in the simulator.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Hashable, Iterable, Sequence
from typing import NamedTuple, Protocol

_INNER_MAX = 8
"""Policies within policies."""


class EvictionPolicy(Protocol):
    """Chooses the resident, unleased blocks that a full tier evicts, and whether newcomers are worth a slot.

    `testing.policy_contract` is the kit that checks an implementation.
    """

    def requested(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        """A request came. `keys` is its chain from the first block on, `slots` says where each block is (or -1).

        Once for each request.
        """

    def finished(self, key: Hashable, output_tokens: int, now_s: float) -> None:
        """The request whose prompt ended with `key` has ended; it generated that many tokens."""

    def inserted(self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float) -> None:
        """These slots are being filled with consecutive blocks of one chain; not to be chosen yet.

        The parent of the first is in slot `parent` (or -1), that of every other in the slot before it.
        """

    def evictable(self, slots: Iterable[int]) -> None:
        """These slots may be chosen: their block became resident, or the last lease on them ended."""

    def removed(self, slots: Iterable[int]) -> None:
        """The slots were emptied in this order, not chosen by the policy: a store failed, or a block was corrupt."""

    def victims(
        self, needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float
    ) -> list[int]:
        """At most `needed` slots to evict, none of them `leased`, for the blocks `incoming` (a chain).

        Each is a block without continuations in the tier once those before it in the answer are gone. Fewer when
        there are no more, or when the end of `incoming` is worth less than every block that could go. The policy
        has forgotten them with its answer, as if each was `removed`: the caller evicts them all.
        """


class KnowsTails(EvictionPolicy, Protocol):
    """What an `EvictionPolicy` may have besides, for models with several groups, of whose blocks some form chains and
    others lie behind them as tails. Other policies are told by `inserted` and `requested`: of a tail as if it was a
    chain of its own."""

    def requested_tail(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        """The request that `requested` told of wants these blocks too; `slots` says where each is (or -1)."""

    def inserted_tail(
        self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float
    ) -> None:
        """As `inserted`, of blocks that prompts need only where they are taken up behind the block in `parent`: they
        are wanted when that block is, until prompts go on from it."""


def request_tail(
    policy: EvictionPolicy, keys: Sequence[Hashable], slots: Sequence[int], now_s: float
) -> None:
    """Tell a policy of either kind of a tail that a request wants."""
    told = getattr(policy, "requested_tail", policy.requested)
    told(keys, slots, now_s)


def insert_tail(
    policy: EvictionPolicy, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float
) -> None:
    """Tell a policy of either kind of blocks that are wanted where the one in `parent` is."""
    told = getattr(policy, "inserted_tail", policy.inserted)
    told(keys, slots, parent, now_s)


class ClientWord(NamedTuple):
    """What a client says of a request's conversation. It may be wrong, and may be a lie.

    `client` is who says it, `session` the client's name of the conversation; without one (an empty name) the word is
    for the blocks that are new in the request. `expect_s`: how many seconds after the end of the request the next one
    is expected, finite and not below 0; None where that is not said. With `final` there is no next one.
    """

    client: str
    session: str
    final: bool = False
    expect_s: float | None = None


class KnowsHints(EvictionPolicy, Protocol):
    """What an `EvictionPolicy` may have besides: it listens to what clients say. Other policies are told nothing."""

    def hinted(self, key: Hashable, word: ClientWord, now_s: float) -> None:
        """The client says this of the request whose prompt ends with `key`.

        It comes after `requested`, or before `finished`, or both times; then the later word counts.
        """


def knows_hints(policy: EvictionPolicy) -> bool:
    """Whether it is a policy of that kind."""
    return hasattr(policy, "hinted")


def tell_hint(policy: EvictionPolicy, key: Hashable, word: ClientWord, now_s: float) -> None:
    """Tell a policy of either kind what a client says."""
    if knows_hints(policy):
        knowing: KnowsHints = policy  # type: ignore[assignment]  # it has the method
        knowing.hinted(key, word, now_s)


def believes(policy: EvictionPolicy, client: str) -> bool:
    """Whether a policy takes what the client says into account, or would if it listened to any: one that has a method
    of this name says so, and so does one `inner` to another."""
    at: object = policy
    for _ in range(_INNER_MAX):
        asked = getattr(at, "believes", None)
        if asked is not None:
            return bool(asked(client))
        at = getattr(at, "inner", None)
    return True


class AdmissionPolicy(Protocol):
    """Decides whether a block may enter a lower tier. `kvbm.testing.admission_contract` checks an implementation."""

    def offered(self, key: Hashable, now_s: float) -> bool:
        """The block could be stored below now; True admits it. One that was admitted may be offered again."""

    def hit(self, key: Hashable, now_s: float) -> None:
        """The block was used again; it may never have been offered here."""


class ManyAtOnce(AdmissionPolicy, Protocol):
    """What an `AdmissionPolicy` may have besides: the same for many blocks in one call, with the same outcome as one
    call for each in this order. Others are called block by block, and so is a subclass that replaces `offered` or `hit`
    and inherits the form for many."""

    def offered_all(self, keys: Sequence[Hashable], now_s: float) -> Sequence[bool]:
        """`offered` for each."""

    def hit_all(self, keys: Sequence[Hashable], now_s: float) -> None:
        """`hit` for each."""


def offer_all(policy: AdmissionPolicy, keys: Sequence[Hashable], now_s: float) -> Sequence[bool]:
    """Offer the blocks to a policy of either kind."""
    if _takes_many(policy, "offered"):
        many: ManyAtOnce = policy  # type: ignore[assignment]  # it has the method
        return many.offered_all(keys, now_s)
    return [policy.offered(key, now_s) for key in keys]


def hit_all(policy: AdmissionPolicy, keys: Sequence[Hashable], now_s: float) -> None:
    """Tell a policy of either kind that the blocks were used again."""
    if _takes_many(policy, "hit"):
        many: ManyAtOnce = policy  # type: ignore[assignment]  # it has the method
        many.hit_all(keys, now_s)
        return
    for key in keys:
        policy.hit(key, now_s)


def _takes_many(policy: AdmissionPolicy, method: str) -> bool:
    """Whether the policy has this method for many blocks too, and a subclass did not replace the one for one block
    alone: then that one decides."""
    for kind in type(policy).__mro__:
        if f"{method}_all" in vars(kind):
            return True
        if method in vars(kind):
            return False
    return False


def none_leased(leased: Container[int], slots: Collection[int]) -> bool:
    """Whether none of the slots is `leased`; fast where the container can say so for many at once, as the manager's."""
    isdisjoint = getattr(leased, "isdisjoint", None)
    if isdisjoint is not None:
        return bool(isdisjoint(slots))
    return not any(slot in leased for slot in slots)
