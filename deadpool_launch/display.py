"""A running job on the terminal: ``render`` draws a ``RunView``, a ``Display`` keeps it shown.

``open_display`` picks ``LiveDisplay`` on a terminal and ``PlainDisplay`` elsewhere.
"""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deadpool_launch.controller.roles import NodeRole
from deadpool_launch.report.words import phase_label
from deadpool_launch.view import RunView

#: Lines for people below the tables.
SHOWN_SAY_LINES = 6
#: Without a terminal: a line of progress every so many steps.
PLAIN_EVERY_STEPS = 10
_REFRESHES_PER_S = 5.0
#: Lines of a frame that are not rows of ranks.
_OTHER_LINES = SHOWN_SAY_LINES + 7
#: With more nodes than this only their number is shown.
_MAX_NAMED_NODES = 8
_ROLE_STYLES = {NodeRole.ACTIVE: "green", NodeRole.SPARE: "blue", NodeRole.LOST: "bold red"}


class Display(Protocol):
    """Shows one run while it lasts; entered before its first record, left after the last."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None: ...
    def show(self, view: RunView) -> None:
        """Show ``view`` as it is now."""


def open_display(console: Console, title: str) -> Display:
    """The display that fits ``console``."""
    return LiveDisplay(console, title) if console.is_terminal else PlainDisplay(console, title)


def print_table(table: RenderableType, console: Console) -> None:
    """Print something with columns, in a file without the blanks that fill up the last one."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)


def render(view: RunView, title: str, max_ranks: int, now: float) -> RenderableType:
    """One frame: headline, nodes, ranks (at most ``max_ranks`` of them), the newest lines.

    ``now``: seconds since the epoch, for the time that has passed.
    """
    return Group(
        _headline(view, title, now),
        _nodes(view),
        Text(),
        _ranks(view, max_ranks) if view.ranks else _starting(view),
        Text(),
        _says(view),
    )


class LiveDisplay:
    """Redraws one frame in place; the last one stays on the screen."""

    def __init__(self, console: Console, title: str) -> None:
        self._title = title
        self._console = console
        self._live = Live(console=console, refresh_per_second=_REFRESHES_PER_S)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, view: RunView) -> None:
        """Draw the frame for ``view``."""
        max_ranks = max(3, self._console.size.height - _OTHER_LINES)
        self._live.update(render(view, self._title, max_ranks, time.time()))


class SilentDisplay:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        pass

    def show(self, view: RunView) -> None:
        """Nothing."""


class PlainDisplay(SilentDisplay):
    """Writes lines: what the launcher tells people, and every tenth step."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._newest_say: tuple[float, str] | None = None
        self._shown_step = 0

    def __enter__(self) -> Self:
        self._print(f"== {self._title}")
        return self

    def show(self, view: RunView) -> None:
        """Write what is new in ``view``."""
        says = list(view.says)
        fresh = says[says.index(self._newest_say) + 1 :] if self._newest_say in says else says
        for at, text in fresh:
            self._print(f"{view.since_start_s(at):7.2f} s  {text}")
        if says:
            self._newest_say = says[-1]
        if view.step // PLAIN_EVERY_STEPS > self._shown_step // PLAIN_EVERY_STEPS:
            self._shown_step = view.step
            self._print(
                f"{view.since_start_s(view.newest_at):7.2f} s  step {view.step}{_loss(view)}"
            )

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _loss(view: RunView) -> str:
    return "" if view.loss is None else f", loss {view.loss:.4f}"


def _headline(view: RunView, title: str, now: float) -> Text:
    elapsed_s = view.since_start_s(now if view.end is None else view.newest_at)
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(title, style="bold")
    text.append(f"   step {view.step}{_loss(view)}   {elapsed_s:.1f} s")
    incident = view.open_incident
    if view.end is not None:
        style = "green" if view.end.exit_code == 0 else "red"
        text.append(f"   {view.end.verdict}", style=style)
    elif incident is not None:
        phase = phase_label(incident.records[-1].get("phase", ""))
        text.append(f"   incident {incident.number}: {phase}", style="bold red")
    return text


def _nodes(view: RunView) -> Text:
    text = Text("nodes: ")
    if len(view.nodes) <= _MAX_NAMED_NODES:
        rows = list(view.nodes.items())
    else:
        counts = Counter(view.nodes.values())
        rows = [(str(counts[role]), role) for role in NodeRole if counts[role]]
    for index, (name, role) in enumerate(rows):
        text.append(f"{', ' if index else ''}{name} ")
        text.append(role, style=_ROLE_STYLES.get(role, "yellow"))
    return text


def _starting(view: RunView) -> Text:
    total = len(view.nodes)
    return Text(f"starting: {len(view.ready)} of {total} nodes are ready", style="dim")


def _ranks(view: RunView, max_ranks: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("rank", "node", "pid", "epoch", "step", "loss", "s/step"):
        table.add_column(name, justify="left" if name == "node" else "right", no_wrap=True)
    ranks = [view.ranks[number] for number in sorted(view.ranks)]
    for rank in ranks[:max_ranks]:
        lost = view.nodes.get(rank.node) is NodeRole.LOST
        replaced = rank.processes > 1
        table.add_row(
            str(rank.rank),
            rank.node,
            str(rank.pid),
            str(rank.epoch),
            "" if rank.step is None else str(rank.step),
            "" if rank.loss is None else f"{rank.loss:.4f}",
            "" if rank.duration_s is None else f"{rank.duration_s:.3f}",
            style="red" if lost else "yellow" if replaced else "",
        )
    if len(ranks) > max_ranks:
        table.add_row("…", f"{len(ranks) - max_ranks} more", *[""] * 5, style="dim")
    return table


def _says(view: RunView) -> Table:
    """The newest lines, one row each while the run lasts; whole in the frame that stays."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=view.end is None, overflow="ellipsis" if view.end is None else "fold")
    for at, text in list(view.says)[-SHOWN_SAY_LINES:]:
        table.add_row(f"{view.since_start_s(at):7.2f} s", Text(text))
    return table
