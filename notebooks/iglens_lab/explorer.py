"""The interactive part of the notebooks. It redraws from a trace: a change of selection never runs the model."""

from __future__ import annotations

import io
from dataclasses import replace

import ipywidgets as widgets
import matplotlib.pyplot as plt

from iglens_core import IGLensError, Readout, Trace, attribute
from iglens_lab import figures


class TokenLayers(widgets.VBox):
    """Choose a token and a range of layers, see its levels and credits.

    options: those of iglens_core.attribute, except targets and layers.
    """

    def __init__(self, readout: Readout, trace: Trace, token: int = 0, **options):
        if not isinstance(trace, Trace) or not isinstance(token, int) or not 0 <= token < len(trace.tokens):
            raise IGLensError(f"TokenLayers: expected a Trace and a row of it, got {type(trace).__name__}, {token!r}")
        if unknown := {"targets", "layers"} & set(options):
            raise IGLensError(f"TokenLayers: {', '.join(sorted(unknown))} cannot be given; the controls choose them")
        self._readout, self._trace, self._options = readout, trace, options
        named = zip(trace.positions.tolist(), trace.tokens, strict=True)
        choices = [(f"{position} → {figures.visible(text)}", t) for t, (position, text) in enumerate(named)]
        baseline = options.get("baseline", "embedding")
        lowest = 1 if isinstance(baseline, str) and baseline == "embedding" else 0
        wide = widgets.Layout(width="420px")
        self.token = widgets.Dropdown(options=choices, value=token, description="token", layout=wide)
        self.layers = widgets.IntRangeSlider(
            value=(lowest, readout.n),
            min=lowest,
            max=readout.n,
            description="layers",
            continuous_update=False,
            layout=wide,
        )
        self.picture = widgets.Image(format="png", layout=widgets.Layout(max_width="100%", align_self="flex-start"))
        self.says = widgets.Label()
        super().__init__([self.token, self.layers, self.picture, self.says])
        for control in (self.token, self.layers):
            control.observe(self._draw, "value")
        self._draw()

    def _draw(self, change=None) -> None:
        t, (low, high) = self.token.value, self.layers.value
        trace = self._trace
        only = {name: getattr(trace, name)[t : t + 1] for name in ("positions", "token_ids", "tokens")}
        options = dict(self._options)
        if getattr(options.get("baseline"), "ndim", 1) == 2:  # a row for each token
            options["baseline"] = options["baseline"][t : t + 1]
        try:
            chosen = range(low, high + 1)
            result = attribute(self._readout, replace(trace, **only), layers=chosen, **options)
            figure = figures.trajectory(result, 0)
            figure.set_size_inches(9, 3.6)  # the same for any number of layers
            with io.BytesIO() as file:
                figure.savefig(file, format="png", dpi=100)
                self.picture.value = file.getvalue()
            plt.close(figure)
        except IGLensError as error:  # shown, not swallowed
            self.picture.value = b""  # not the picture of another selection
            self.says.value = f"cannot be drawn: {error}"
            return
        onset, gain = int(result.onset()[0]), float(result.delta[0])
        change = f"change of {figures.scalar_name(result.scalar)}: {gain:.4f}"
        self.says.value = f"layers {low} … {high}, and {result.layers[-1]}: {change}, onset at layer {onset}"

    def __repr__(self) -> str:
        return f"TokenLayers({len(self._trace.tokens)} tokens, {self._readout.n} layers)"
