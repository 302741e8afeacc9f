// Who took part, and who holds what.

const KINDS = { participants: ["took part", "--accent"], dropped: ["dropped out", "--warm"], rejected: ["was rejected", "--ink"] };
const MOST_CELLS = 400000;

// A row for each client (or block of clients), a column for each round: 1 where one of them is named, else nothing.
function raster(rounds, clients, block) {
  const rows = Array.from({ length: Math.ceil(clients / block) }, () => new Array(rounds.length).fill(null));
  rounds.forEach((ids, i) => ids.forEach((id) => (rows[Math.floor(id / block)][i] = 1)));
  return rows;
}

function drawSchedule() {
  const node = document.getElementById("schedule");
  const run = DATA.runs[document.getElementById("schedule-choice").value];
  const { clients, ...kinds } = DATA.schedules[run.schedule];
  const length = Object.values(kinds)[0].length;
  const block = Math.ceil((clients * length) / MOST_CELLS);
  const drawn = Object.entries(kinds).map(([kind, rounds]) => {
    const [words, colour] = KINDS[kind];
    const who = block > 1 ? `of clients %{y} to ${block - 1} more, some` : "client %{y}";
    return {
      type: "heatmap",
      z: raster(rounds, clients, block),
      x0: 1,
      dx: 1,
      y0: 0,
      dy: block,
      showscale: false,
      colorscale: [[0, css(colour)], [1, css(colour)]],
      hovertemplate: `round %{x}, ${who} ${words}<extra></extra>`,
    };
  });
  draw(node, drawn, {
    height: Math.max(260, Math.min(520, clients * 4)),
    xaxis: { title: { text: "round" }, showgrid: false, zeroline: false },
    yaxis: { title: { text: block > 1 ? `client (${block} to a row)` : "client" }, showgrid: false, zeroline: false },
  });
  const times = new Array(clients).fill(0);
  (kinds.participants ?? []).flat().forEach((id) => (times[id] += 1));
  const [least, most] = times.reduce(([a, b], n) => [Math.min(a, n), Math.max(b, n)], [Infinity, 0]);
  const others = Object.entries(kinds).filter(([kind]) => kind !== "participants");
  const more = others.map(([kind, rounds]) => `; ${rounds.flat().length} times a client ${KINDS[kind][0]}`).join("");
  const words = `Each of ${clients} clients took part in ${least === most ? least : `${least} to ${most}`} of ${length} rounds`;
  document.getElementById("schedule-words").textContent = `${words}${more}.`;
}

// Pale to strong on paper, dim to bright on a dark screen; no sample at all has no colour.
const LADDERS = { light: ["#e6f2d5", "#6cc4bd", "#2171a8", "#0b2559"], dark: ["#1f3a52", "#22768f", "#57bf9c", "#f4f3a6"] };

function drawHoldings() {
  const node = document.getElementById("holdings");
  const { classes, counts } = DATA.holdings[document.getElementById("holdings-choice").value];
  const sizes = counts.map((row) => row.reduce((sum, n) => sum + n, 0));
  const most = Math.max(1, ...counts.map((row) => Math.max(...row)));
  const marks = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000].filter((n) => n <= most);
  const ticks = marks.filter((n, i) => !marks[i + 1] || Math.sqrt(marks[i + 1]) - Math.sqrt(n) > 0.08 * Math.sqrt(most));
  const ladder = LADDERS[isDark() ? "dark" : "light"];
  const byClass = classes.map((_, c) => counts.map((row) => row[c]));
  const map = {
    type: "heatmap",
    z: byClass.map((row) => row.map((n) => (n ? Math.sqrt(n) : null))),
    customdata: byClass,
    colorscale: ladder.map((colour, i) => [i / (ladder.length - 1), colour]),
    zmin: 0,
    zmax: Math.sqrt(most),
    colorbar: { title: { text: "samples" }, tickvals: ticks.map(Math.sqrt), ticktext: ticks, thickness: 10, len: 0.75, y: 0.37 },
    hovertemplate: "client %{x}, class %{y}: %{customdata}<extra></extra>",
  };
  const bars = { type: "bar", y: sizes, yaxis: "y2", marker: { color: css("--accent") }, hovertemplate: "client %{x}: %{y}<extra></extra>" };
  draw(node, [map, bars], {
    height: Math.max(320, Math.min(700, 120 + 22 * classes.length)),
    bargap: 0.1,
    xaxis: { title: { text: "client" }, showgrid: false, zeroline: false },
    yaxis: { domain: [0, 0.75], showgrid: false, zeroline: false, autorange: "reversed", tickvals: classes.map((_, c) => c), ticktext: classes.map(plain) },
    yaxis2: { domain: [0.8, 1], title: { text: "samples" }, gridcolor: css("--line"), nticks: 4, automargin: true },
  });
  const held = counts.map((row) => row.filter((n) => n > 0).length);
  const mean = (values) => values.reduce((sum, n) => sum + n, 0) / values.length;
  document.getElementById("holdings-words").textContent =
    `${counts.length} clients hold ${Math.min(...sizes)} to ${Math.max(...sizes)} samples, ` +
    `of ${mean(held).toFixed(1)} of the ${classes.length} classes on average.`;
}

// How many clients have which value: a hill for each configuration that is drawn.
function drawFairness() {
  const node = document.getElementById("fairness");
  const metric = document.getElementById("fairness-choice").value;
  const values = DATA.groups.map((_, index) => runsOf(index).flatMap((run) => run.clients[metric] ?? []).filter((v) => v !== null));
  const drawn = [...DATA.groups.keys()].filter((index) => values[index].length && !state.hidden.has(index));
  const all = drawn.flatMap((index) => values[index]);
  const [low, high] = all.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  const size = (high - low || 1) / 20;
  const bins = Array.from({ length: 21 }, (_, i) => low + i * size);
  const traces = drawn.map((index) => {
    const group = DATA.groups[index];
    const counts = new Array(20).fill(0);
    values[index].forEach((v) => (counts[Math.min(19, Math.floor((v - low) / size))] += 1));
    const shares = counts.map((n) => (100 * n) / values[index].length);
    return {
      type: "scatter",
      mode: "lines",
      name: plain(group.label),
      x: bins,
      y: [...shares, shares[19]],
      line: { shape: "hv", width: 2, color: isDark() ? group.dark : group.colour, dash: group.dash },
      fill: drawn.length < 3 ? "tozeroy" : "none",
      hovertemplate: "%{y:.1f} % of clients from %{x:.3g}<extra>%{fullData.name}</extra>",
    };
  });
  draw(node, traces, {
    xaxis: { title: { text: plain(metric.replaceAll("_", " ")) }, zeroline: false },
    yaxis: { title: { text: "clients (%)" }, rangemode: "tozero" },
  });
  const mean = (some) => some.reduce((sum, v) => sum + v, 0) / some.length;
  document.getElementById("fairness-words").textContent = drawn
    .slice(0, 4)
    .map((index) => `${DATA.groups[index].label}: mean ${mean(values[index]).toPrecision(3)}, ${values[index].length} values`)
    .join("; ");
}

function drawPictures() {
  if (document.getElementById("fairness")) drawFairness();
  if (document.getElementById("schedule")) drawSchedule();
  if (document.getElementById("holdings")) drawHoldings();
}
