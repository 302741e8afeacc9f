// The curves: one colour a configuration, as mean and range over its seeds or seed by seed.

const state = { x: "round", show: "mean", smooth: 1, hidden: new Set() };
const AXES = { round: "round", sent: "numbers sent, in sizes of the model", elapsed: "seconds" };

// A point without neighbours has no line through it, so it becomes a dot.
function dots(y) {
  const alone = y.map((v, i) => v !== null && (y[i - 1] ?? null) === null && (y[i + 1] ?? null) === null);
  return alone.includes(true) ? { mode: "lines+markers", marker: { size: alone.map((dot) => (dot ? 6 : 0)) } } : {};
}

function line(name, points, y, style, digits) {
  return {
    type: "scatter",
    mode: "lines",
    name,
    x: points.map((point) => point.x),
    y,
    customdata: points.map((point) => point.round),
    line: style,
    hovertemplate: `%{y:${digits}}${state.x === "round" ? "" : " in round %{customdata}"}<extra>%{fullData.name}</extra>`,
    ...dots(y),
  };
}

function band(points, colour) {
  const back = points.toReversed();
  return {
    type: "scatter",
    mode: "lines",
    x: [...points, ...back].map((point) => point.x),
    y: [...points.map((point) => point.high), ...back.map((point) => point.low)],
    fill: "toself",
    fillcolor: `${colour}2b`,
    line: { width: 0 },
    hoverinfo: "skip",
  };
}

function seedLines(curves, group, colour, digits) {
  const style = { color: colour, dash: group.dash, width: state.show === "both" ? 0.8 : 1.4 };
  return curves.map(({ run, round, x, y }) => {
    const points = round.map((r, i) => ({ round: r, x: x[i] }));
    // Over rounds that were not evaluated, as the mean does.
    return { ...line(plain(`${group.label} seed ${run.seed}`), points, y, style, digits), connectgaps: true };
  });
}

function meanLines(curves, group, colour, digits) {
  const points = together(curves);
  const name = plain(group.label);
  const whole = points.map((point) => (point.count === curves.length ? point.y : null));
  const rest = points.map((point, i) => (whole[i] === null ? point.y : null));
  const lines = curves.length > 1 ? [band(points, colour)] : [];
  lines.push({ ...line(name, points, whole, { color: colour, dash: group.dash, width: 2.2 }, digits), meta: "mean" });
  if (rest.some((y) => y !== null)) {
    lines.push(line(`${name} (some seeds)`, points, rest, { color: colour, dash: "dash", width: 1 }, digits));
  }
  return lines;
}

function crosses(curves, colour) {
  const ends = curves
    .filter(({ run }) => run.status === "diverged")
    .map(({ x, y }) => [x, y, y.findLastIndex((value) => value !== null)])
    .filter(([, , last]) => last >= 0);
  if (!ends.length) return [];
  const marker = { symbol: "x-thin", size: 9, line: { color: colour, width: 2.5 } };
  const [x, y] = [ends.map(([x, , i]) => x[i]), ends.map(([, y, i]) => y[i])];
  return [{ type: "scatter", mode: "markers", x, y, marker, hovertemplate: "diverged<extra></extra>" }];
}

function traces(what) {
  const digits = what.factor === 100 ? ".2f" : ".4~g";
  return DATA.groups.flatMap((group, index) => {
    const curves = state.hidden.has(index) ? [] : runsOf(index).map((run) => curve(run, what, state)).filter(Boolean);
    if (!curves.length) return [];
    const colour = isDark() ? group.dark : group.colour;
    return [
      ...(state.show === "mean" ? [] : seedLines(curves, group, colour, digits)),
      ...(state.show === "seeds" ? [] : meanLines(curves, group, colour, digits)),
      ...crosses(curves, colour),
    ];
  });
}

// A loss whose largest value is more than twenty times its smallest is drawn on a logarithmic scale, as in figures.py.
function scale(drawn) {
  const values = drawn.flatMap((trace) => trace.y).filter((v) => v !== null);
  const [low, high] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  return low > 0 && high > 20 * low ? "log" : "linear";
}

function drawChart(node) {
  const { of, key, factor, log } = node.dataset;
  const drawn = traces({ of, key, factor: Number(factor) });
  const few = drawn.filter((trace) => trace.hoverinfo !== "skip").length <= 8;
  draw(node, drawn, {
    xaxis: { title: { text: AXES[state.x] }, rangemode: "tozero" },
    yaxis: { type: log === undefined ? "linear" : scale(drawn) },
    hovermode: state.x === "round" && few ? "x unified" : "closest",
    uirevision: `${key} ${state.x}`,
    annotations: drawn.length ? [] : [{ text: "nothing recorded", showarrow: false, xref: "paper", yref: "paper" }],
  });
}

const drawCurves = () => document.querySelectorAll(".chart").forEach(drawChart);

// With the keyboard: the arrow keys go from round to round, and the values there are shown and said.
function readChart(node, event) {
  const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
  const shown = node.data.filter((trace) => trace.hoverinfo !== "skip" && trace.customdata);
  const rounds = [...new Set(shown.flatMap((trace) => trace.customdata))].sort((a, b) => a - b);
  if (!(event.key in steps) || !rounds.length) return;
  event.preventDefault();
  const place = rounds.indexOf(Number(node.dataset.round)) + steps[event.key];
  const round = rounds[Math.max(0, Math.min(rounds.length - 1, place))];
  node.dataset.round = round;
  const points = shown.flatMap((trace) => {
    const pointNumber = trace.customdata.indexOf(round);
    const there = pointNumber >= 0 && trace.y[pointNumber] !== null;
    return there ? [{ curveNumber: node.data.indexOf(trace), pointNumber, trace }] : [];
  });
  Plotly.Fx.hover(node, points.map(({ curveNumber, pointNumber }) => ({ curveNumber, pointNumber })));
  const said = points.map(({ trace, pointNumber }) => `${trace.name} ${Number(trace.y[pointNumber].toPrecision(4))}`);
  document.getElementById("heard").textContent = `round ${round}: ${said.join(", ")}`;
}
