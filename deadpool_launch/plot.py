"""The loss curves of an undisturbed and a disturbed run as a PNG.

Needs matplotlib (the extra ``plot``), which is imported only when a picture is drawn.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deadpool_launch.curves import loss_curve, steps_run_again
from deadpool_launch.errors import UsageError
from deadpool_launch.view import RunView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_REFERENCE = {"color": "#9ecae1", "linewidth": 5, "solid_capstyle": "round", "label": "undisturbed"}
_DISTURBED = {"color": "#08306b", "linewidth": 1.3, "label": "with the fault"}
_INCIDENT = "#cb181d"


def require_matplotlib() -> None:
    """Raise a ``UsageError`` if plots cannot be drawn here; called before anything is started."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--plot: matplotlib is not installed; install matplotlib (pip install matplotlib)"
        )


def check_path(path: Path) -> None:
    """Raise a ``UsageError`` if no PNG can be written to ``path``."""
    if path.suffix.lower() != ".png":
        raise UsageError(f"--plot {path}: must end in .png")
    folder = path.absolute().parent
    if not os.path.isdir(folder):
        raise UsageError(f"--plot {path}: the folder does not exist")
    if os.path.isdir(path):
        raise UsageError(f"--plot {path}: is a folder; name a file in it")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UsageError(f"--plot {path}: cannot be written; name a file in another folder")


def save(figure: Figure, path: Path) -> None:
    """Write the file. Raises ``UsageError``."""
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise UsageError(
            f"--plot {path}: cannot be written ({error.strerror}); name another file"
        ) from error


def draw(reference: RunView | None, disturbed: RunView, path: Path, title: str) -> None:
    """Write the picture: above, loss by step; below, step by time, where recovery is a gap."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, wrap=True)
    by_step, by_time = figure.subplots(2, 1, height_ratios=[3, 2])
    _draw_losses(by_step, reference, disturbed)
    _draw_progress(by_time, reference, disturbed)
    save(figure, path)


def _draw_losses(axes: Axes, reference: RunView | None, disturbed: RunView) -> None:
    for view, style in ((reference, _REFERENCE), (disturbed, _DISTURBED)):
        if view is not None:
            curve = loss_curve(view)
            axes.plot([p.step for p in curve], [p.loss for p in curve], **_style(style))
    losses = {point.step: point.loss for point in loss_curve(disturbed)}
    again: list[int] = []
    for incident in disturbed.incidents.values():
        steps = [step for step in steps_run_again(disturbed, incident) if step in losses]
        again += steps
        reached = max(
            (step.step for step in disturbed.steps if step.at <= incident.opened_at), default=0
        )
        at = steps[0] if steps else reached + 1
        axes.axvline(at, color=_INCIDENT, linestyle="--", linewidth=1, zorder=0)
        axes.annotate(
            f"incident {incident.number}",
            (at, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(4, -12),
            textcoords="offset points",
            color=_INCIDENT,
            fontsize=9,
        )
    if again:
        axes.plot(
            again,
            [losses[step] for step in again],
            linestyle="none",
            marker="o",
            markersize=8,
            markerfacecolor="none",
            markeredgecolor=_INCIDENT,
            label="interrupted step, run again",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss, mean over ranks")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right")
    axes.grid(alpha=0.3)


def _draw_progress(axes: Axes, reference: RunView | None, disturbed: RunView) -> None:
    for view, style in ((reference, _REFERENCE), (disturbed, _DISTURBED)):
        if view is not None and view.steps:
            begin = view.steps[0].at
            curve = loss_curve(view)
            axes.plot([p.at - begin for p in curve], [p.step for p in curve], **_style(style))
    if disturbed.steps:
        begin = disturbed.steps[0].at
        for incident in disturbed.incidents.values():
            opened = incident.fault_at - begin
            closed = (incident.closed_at or disturbed.newest_at) - begin
            axes.axvspan(opened, closed, color=_INCIDENT, alpha=0.15, linewidth=0)
            axes.annotate(
                f"{closed - opened:.2f} s",
                ((opened + closed) / 2, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, -12),
                textcoords="offset points",
                ha="center",
                color=_INCIDENT,
                fontsize=9,
            )
    axes.set_xlabel("seconds since the first step")
    axes.set_ylabel("step")
    axes.grid(alpha=0.3)


def _style(style: dict[str, Any]) -> dict[str, Any]:
    return dict(style)
