// The numbers of the page, and how they become lines: running means, and the mean and the range over seeds.

const DATA = JSON.parse(document.getElementById("data").textContent);

const runsOf = (group) => DATA.runs.filter((run) => run.group === group);

// The mean over the last `width` rounds; nothing where the round itself has no value.
function smoothed(values, rounds, width) {
  let first = 0;
  return values.map((value, i) => {
    while (rounds[i] - rounds[first] >= width) first += 1;
    if (width === 1 || value === null) return value;
    const known = values.slice(first, i + 1).filter((v) => v !== null);
    return known.reduce((sum, v) => sum + v, 0) / known.length;
  });
}

// One run's values over the chosen axis; null if it lacks either.
function curve(run, { of, key, factor }, { x, smooth }) {
  const values = run[of][key];
  if (!values || !run.rounds[x]) return null;
  const scaled = values.map((v) => (v === null ? null : v * factor));
  return { run, round: run.rounds.round, x: run.rounds[x], y: smoothed(scaled, run.rounds.round, smooth) };
}

// Mean and range over seeds, a point for each round; `count` is how many seeds have a value there.
function together(curves) {
  const points = new Map();
  for (const { round, x, y } of curves) {
    y.forEach((value, i) => {
      if (value === null) return;
      const point = points.get(round[i]) ?? { round: round[i], x: 0, y: 0, low: value, high: value, count: 0 };
      points.set(round[i], point);
      point.x += x[i];
      point.y += value;
      point.low = Math.min(point.low, value);
      point.high = Math.max(point.high, value);
      point.count += 1;
    });
  }
  return [...points.values()]
    .sort((a, b) => a.round - b.round)
    .map((point) => ({ ...point, x: point.x / point.count, y: point.y / point.count }));
}
