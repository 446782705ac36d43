"""The interactive part of the notebooks. It redraws from a trace: a change of selection never runs the model."""

from __future__ import annotations

import io
from dataclasses import replace

import ipywidgets as widgets
import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from iglens_core import IGLensError, Readout, Trace, attribute, path_credits
from iglens_lab import figures, theory

WIDE = widgets.Layout(width="420px")
SLIDER = {"continuous_update": False, "layout": WIDE, "style": {"description_width": "90px"}}


class _Drawn(widgets.VBox):
    """Controls above a picture and a line of text, redrawn at each change; what cannot be drawn is said there."""

    def __init__(self, controls: list[widgets.Widget]):
        self.picture = widgets.Image(format="png", layout=widgets.Layout(max_width="100%", align_self="flex-start"))
        self.says = widgets.Label()
        super().__init__([*controls, self.picture, self.says])
        for control in controls:
            control.observe(self._draw, "value")
        self._draw()

    def _figure(self) -> tuple[Figure, str]:
        raise NotImplementedError

    def _draw(self, change=None) -> None:
        try:
            figure, text = self._figure()
            try:
                with io.BytesIO() as file:
                    figure.savefig(file, format="png", dpi=100)
                    self.picture.value = file.getvalue()
            finally:
                plt.close(figure)
            self.says.value = text
        except IGLensError as error:  # shown, not swallowed
            self.picture.value = b""  # not the picture of another selection
            self.says.value = f"cannot be drawn: {error}"


class Segment(_Drawn):
    """Move the ends of a path of one segment on the plane, bend it, and choose the steps of the estimators.

    readout: of width 2; start, end: [2], where the sliders begin.
    """

    def __init__(self, readout: Readout, start, end, target: int = 0):
        self._readout, self._target = readout, target
        names = ("start, first", "start, second", "end, first", "end, second")
        places = [*map(float, start), *map(float, end)]
        if len(places) != 4 or not all(abs(place) <= 2.5 for place in places):
            raise IGLensError(f"Segment: expected two points of two coordinates, −2.5 … 2.5, got {places}")
        self.ends = [
            widgets.FloatSlider(value=value, min=-2.5, max=2.5, step=0.1, description=name, **SLIDER)
            for name, value in zip(names, places, strict=True)
        ]
        self.bend = widgets.FloatSlider(value=0.4, min=-1, max=1, step=0.1, description="bend", **SLIDER)
        self.steps = widgets.IntSlider(value=4, min=1, max=32, description="steps", **SLIDER)
        super().__init__([*self.ends, self.bend, self.steps])

    def _figure(self) -> tuple[Figure, str]:
        ends = torch.tensor([slider.value for slider in self.ends], dtype=torch.float64).view(2, 2)
        curve = theory.curves(*ends, bend=self.bend.value)["bent"]
        figure = figures.plane(self._readout, {"straight": ends, "bent": curve}, self._target, arrows=False)
        steps, found = self.steps.value, {}
        for estimator in ("observed", "midpoint", "gauss-legendre"):
            options = {"estimator": estimator, "steps": steps}
            found[estimator] = float(path_credits(self._readout, ends[:, None], [self._target], **options)[0])
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        along = theory.integral(self._readout, curve, self._target)
        return figure, f"{steps} steps: {numbers}; along the bent curve {along:.4f}"

    def __repr__(self) -> str:
        return f"Segment(d = {self._readout.d})"


class TokenLayers(_Drawn):
    """Choose a token and a range of layers, see its levels and credits.

    translators: by their ridge; then the path can be switched between plain and translated. options: those of
    iglens_core.attribute, except targets and layers.
    """

    def __init__(self, readout: Readout, trace: Trace, token: int = 0, translators: dict | None = None, **options):
        if not isinstance(trace, Trace) or not isinstance(token, int) or not 0 <= token < len(trace.tokens):
            raise IGLensError(f"TokenLayers: expected a Trace and a row of it, got {type(trace).__name__}, {token!r}")
        if unknown := {"targets", "layers"} & set(options):
            raise IGLensError(f"TokenLayers: {', '.join(sorted(unknown))} cannot be given; the controls choose them")
        self._readout, self._trace, self._options = readout, trace, options
        named = zip(trace.positions.tolist(), trace.tokens, strict=True)
        choices = [(f"{position} → {figures.visible(text)}", t) for t, (position, text) in enumerate(named)]
        baseline = options.get("baseline", "embedding")
        lowest = 1 if isinstance(baseline, str) and baseline == "embedding" else 0
        self.token = widgets.Dropdown(options=choices, value=token, description="token", layout=WIDE)
        self.layers = widgets.IntRangeSlider(
            value=(lowest, readout.n), min=lowest, max=readout.n, description="layers", **SLIDER
        )
        controls, self.path, self.ridge = [self.token, self.layers], None, None
        if translators:
            self._translators = translators
            self.path = widgets.ToggleButtons(options=["plain", "translated"], description="path")
            self.ridge = widgets.SelectionSlider(options=sorted(translators), description="ridge", **SLIDER)
            controls += [self.path, self.ridge]
        super().__init__(controls)

    def _figure(self) -> tuple[Figure, str]:
        t, (low, high) = self.token.value, self.layers.value
        trace = self._trace
        only = {name: getattr(trace, name)[t : t + 1] for name in ("positions", "token_ids", "tokens")}
        options = dict(self._options)
        if getattr(options.get("baseline"), "ndim", 1) == 2:  # a row for each token
            options["baseline"] = options["baseline"][t : t + 1]
        if self.path is not None and self.path.value == "translated":
            options["translators"] = self._translators[self.ridge.value]
        result = attribute(self._readout, replace(trace, **only), layers=range(low, high + 1), **options)
        figure = figures.trajectory(result, 0)
        figure.set_size_inches(9, 3.6)  # the same for any number of layers
        onset, gain = int(result.onset()[0]), float(result.delta[0])
        change = f"change of {figures.scalar_name(result.scalar)}: {gain:.4f}"
        also = "" if high == result.layers[-1] else f", and {result.layers[-1]}"
        return figure, f"layers {low} … {high}{also}: {change}, onset at layer {onset}"

    def __repr__(self) -> str:
        return f"TokenLayers({len(self._trace.tokens)} tokens, {self._readout.n} layers)"
