// A first click on a column of numbers puts the largest first, or the smallest if that is best; on words, the first letter.
function sort(header) {
  const row = header.parentElement;
  const body = row.closest("table").tBodies[0];
  const column = [...row.cells].indexOf(header);
  const keyed = [...body.rows].map((tr) => [tr.cells[column].dataset.value ?? tr.cells[column].textContent.trim(), tr]);
  const known = keyed.filter(([key]) => key !== "");
  const numeric = known.every(([key]) => Number.isFinite(Number(key)));
  const first = header.dataset.first ?? (numeric ? "descending" : "ascending");
  const other = first === "ascending" ? "descending" : "ascending";
  const order = header.getAttribute("aria-sort") === first ? other : first;
  const sign = order === "ascending" ? 1 : -1;
  known.sort(([a], [b]) => sign * (numeric ? a - b : a.localeCompare(b, "en", { numeric: true })));
  for (const cell of row.cells) cell.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", order);
  body.append(...known.map(([, tr]) => tr), ...keyed.filter(([key]) => key === "").map(([, tr]) => tr));
}

// A spreadsheet must take a name for a name, also one that begins like a formula.
function cell(value) {
  if (typeof value !== "string") return value ?? "";
  const safe = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

// All rounds of all runs, a line each.
function roundsAsCsv() {
  const names = (of) => [...new Set(DATA.runs.flatMap((run) => Object.keys(run[of])))];
  const [curves, notes] = [names("rounds"), names("notes")];
  const lines = [["run", "configuration", "seed", ...curves, ...notes].map(cell).join(",")];
  for (const run of DATA.runs) {
    run.rounds.round.forEach((_, i) => {
      const values = [...curves.map((key) => run.rounds[key]?.[i]), ...notes.map((key) => run.notes[key]?.[i])];
      lines.push([run.name, DATA.groups[run.group].label, run.seed, ...values].map(cell).join(","));
    });
  }
  return `${lines.join("\n")}\n`;
}

function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
