"use strict";

// A first click on a column of numbers puts the largest first, on a column of words the first letter.
function sort(header) {
  const row = header.parentElement;
  const body = row.closest("table").tBodies[0];
  const column = [...row.cells].indexOf(header);
  const keyed = [...body.rows].map((tr) => [tr.cells[column].dataset.value ?? tr.cells[column].textContent.trim(), tr]);
  const known = keyed.filter(([key]) => key !== "");
  const numeric = known.every(([key]) => Number.isFinite(Number(key)));
  const first = numeric ? "descending" : "ascending";
  const other = numeric ? "ascending" : "descending";
  const order = header.getAttribute("aria-sort") === first ? other : first;
  const sign = order === "ascending" ? 1 : -1;
  known.sort(([a], [b]) => sign * (numeric ? a - b : a.localeCompare(b, "en", { numeric: true })));
  for (const cell of row.cells) cell.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", order);
  body.append(...known.map(([, tr]) => tr), ...keyed.filter(([key]) => key === "").map(([, tr]) => tr));
}

for (const header of document.querySelectorAll("table.sortable thead th")) {
  header.querySelector("button").addEventListener("click", () => sort(header));
}

document.getElementById("download").addEventListener("click", () => {
  const text = document.getElementById("data").textContent;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = "curves.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
});
