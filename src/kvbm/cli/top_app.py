"""The live screen of `kvbm top`. Needs textual; what it shows is `top_picture`'s."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import ClassVar, Protocol

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from kvbm.admin_protocol import Moment, SnapshotReply
from kvbm.cli.top_picture import page
from kvbm.errors import KvbmError, SettingsError
from kvbm.observe.view import look, start_of

RECENT_S = 5.0
"""Flows and evictions are the mean over about so many seconds."""
_ROWS_MIN = 3
_OTHER_LINES = 22
"""Lines of a page that are no rows of prefixes or engines."""


class StateSource(Protocol):
    """Where the states come from."""

    socket_path: str

    def take(self) -> SnapshotReply:
        """The manager's state now; may block. Raises KvbmError in one line while there is none."""
        ...


class TopApp(App[None]):
    """Looks at a manager every `interval_s` seconds. When it has gone it says so, and goes on looking."""

    TITLE = "kvbm top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        ("s", "since_start", "Last minute / since the start"),
        ("space", "pause", "Pause"),
    ]
    CSS = "#page { width: 100%; height: auto; }"

    def __init__(self, source: StateSource, interval_s: float, since_start: bool = False) -> None:
        super().__init__()
        self._source = source
        self._interval_s = interval_s
        self._since_start = since_start
        self._paused = False
        self._trouble = ""
        self._state: SnapshotReply | None = None
        self._recent: deque[Moment] = deque()
        self._looking = asyncio.Lock()

    def compose(self) -> ComposeResult:
        """A page that scrolls where it is longer than the screen, and the keys."""
        with VerticalScroll():
            yield Static(id="page")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self.run_worker(self._watch())

    def on_resize(self) -> None:
        """The tables depend on the width."""
        self._draw()

    def action_since_start(self) -> None:
        """Count from the manager's start, or over the last minute."""
        self._since_start = not self._since_start
        self._draw()

    def action_pause(self) -> None:
        """Keep the screen as it is, or go on."""
        self._paused = not self._paused
        self._draw()

    async def look(self) -> None:
        """Look once, after a look that is under way. Reading a socket may block, so another thread does it."""
        async with self._looking:
            try:
                state = await asyncio.to_thread(self._source.take)
            except KvbmError as error:
                self._trouble = str(error)
                if isinstance(error, SettingsError) and self._state is not None:
                    self._trouble = "the manager has gone"
            else:
                self._seen(state)
        self._draw()

    def _seen(self, state: SnapshotReply) -> None:
        self._trouble = ""
        if self._state is not None and self._state.manager.epoch != state.manager.epoch:
            self._recent.clear()
        self._state = state
        self._recent.append(state.now)
        while len(self._recent) > 2 and state.now.at_s - self._recent[1].at_s >= RECENT_S:
            self._recent.popleft()

    async def _watch(self) -> None:
        while True:
            if not self._paused:
                await self.look()
            await asyncio.sleep(self._interval_s)

    def _draw(self) -> None:
        if self.is_mounted and self._screen_is_up():
            self.query_one("#page", Static).update(self._page())

    def _screen_is_up(self) -> bool:
        return bool(self.screen_stack) and bool(self.screen.query("#page"))

    def _page(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._trouble:
            parts.append(Text(f"✗ {self._trouble}; looking for one again", style="bold red"))
        if self._paused:
            parts.append(Text("paused", style="bold yellow"))
        if self._state is not None:
            if self._trouble:
                parts.append(Text("what it was when it was last seen:", style="dim"))
            since = start_of(self._state) if self._since_start else None
            view = look(self._state, since, self._recent[0] if self._recent else None)
            rows = max(_ROWS_MIN, self.size.height - _OTHER_LINES)
            parts.append(page(view, self._source.socket_path, self.size.width - 2, rows))
        elif not self._trouble:
            parts.append(Text("looking…", style="dim"))
        return Group(*parts)
