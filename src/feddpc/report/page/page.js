// What happens when: the page is opened, a control is used, the window changes, the screen turns dark, it is printed.

const byId = (id) => document.getElementById(id);

function drawAll() {
  drawCurves();
  drawPictures();
}

// Of many configurations, the ten that ended best are drawn at first.
const MANY = 12;
function best(count) {
  const rank = (index) => DATA.groups[index].rank ?? -Number.MAX_VALUE;
  const order = [...DATA.groups.keys()].sort((a, b) => rank(b) - rank(a));
  return new Set(order.slice(count));
}

function button(parent, text, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.append(text);
  made.addEventListener("click", act);
  parent.append(made);
  return made;
}

function hide(hidden) {
  state.hidden = hidden;
  const count = DATA.groups.length;
  [...byId("legend").children].forEach((item, index) => item.setAttribute("aria-pressed", !hidden.has(index)));
  byId("drawn").textContent = hidden.size ? `${count - hidden.size} of ${count} drawn` : "";
  drawCurves();
  if (byId("fairness")) drawFairness();
}

function makeLegend() {
  DATA.groups.forEach((group, index) => {
    const item = button(byId("legend"), group.label, () => {
      const others = new Set(state.hidden);
      if (!others.delete(index)) others.add(index);
      hide(others);
    });
    const swatch = document.createElement("span");
    swatch.className = `swatch ${group.dash}`;
    swatch.style.setProperty("--light", group.colour);
    swatch.style.setProperty("--dark", group.dark);
    item.prepend(swatch);
  });
  if (DATA.groups.length > 2) {
    button(byId("which"), "all", () => hide(new Set()));
    button(byId("which"), "none", () => hide(new Set(DATA.groups.keys())));
  }
  if (DATA.groups.length > MANY) button(byId("which"), "ten best", () => hide(best(10)));
}

function sayWhatIsSent() {
  const without = DATA.runs.filter((run) => !run.rounds.sent).map((run) => run.name);
  const counted = "Numbers sent are those of all clients up and down, in sizes of the model, at the run's mean rate.";
  const missing = without.length ? ` Not counted yet, so not drawn over them: ${without.join(", ")}.` : "";
  byId("sent-words").textContent = state.x === "sent" ? counted + missing : "";
}

for (const name of ["x", "show", "smooth"]) {
  byId(name).addEventListener("change", (event) => {
    state[name] = name === "smooth" ? Number(event.target.value) : event.target.value;
    sayWhatIsSent();
    drawCurves();
  });
}
for (const choice of document.querySelectorAll(".note-choice")) {
  const chart = choice.closest("figure").querySelector(".chart");
  choice.addEventListener("change", () => {
    chart.dataset.key = choice.value;
    drawChart(chart);
  });
}
byId("fairness-choice")?.addEventListener("change", drawFairness);
byId("schedule-choice")?.addEventListener("change", drawSchedule);
byId("holdings-choice")?.addEventListener("change", drawHoldings);
for (const chart of document.querySelectorAll(".chart")) {
  chart.addEventListener("keydown", (event) => readChart(chart, event));
  chart.addEventListener("blur", () => Plotly.Fx.unhover(chart));
}
for (const header of document.querySelectorAll("table.sortable thead th")) {
  header.querySelector("button").addEventListener("click", () => sort(header));
}
byId("download-csv").addEventListener("click", () => download("rounds.csv", "text/csv", roundsAsCsv()));
byId("download-json").addEventListener("click", () => {
  download("report.json", "application/json", byId("data").textContent);
});

darkScreen.addEventListener("change", drawAll);
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) drawAll(); // a phone's address bar changes the height only
  width = innerWidth;
});
// On paper everything is open, light, and as wide as a sheet.
let closed = [];
addEventListener("beforeprint", () => {
  document.documentElement.classList.add("paper");
  closed = [...document.querySelectorAll("details:not([open])")];
  for (const part of closed) part.open = true;
  drawAll();
});
addEventListener("afterprint", () => {
  document.documentElement.classList.remove("paper");
  for (const part of closed) part.open = false;
  drawAll();
});

makeLegend();
hide(DATA.groups.length > MANY ? best(10) : new Set());
drawPictures();
document.documentElement.dataset.ready = "";
