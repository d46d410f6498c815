"use strict";
const plots = [...document.querySelectorAll(".plot")];
const narrow = matchMedia("(max-width: 600px)");
const config = {
  displaylogo: false, responsive: true, plotlyServerURL: "", toImageButtonOptions: { format: "svg" },
  modeBarButtonsToRemove: ["sendChartToCloud", "select2d", "lasso2d", "autoScale2d"],
};

// The x of curves of a run, by steps, tokens or time: of all curves of a run the same, but circles have their own.
const axes = JSON.parse(document.getElementById("axes")?.textContent ?? "{}");
const axisKey = "axis:" + location.pathname;
const xOf = (trace, axis) => trace.meta?.x[axis] ?? axes[axis][trace.legendgroup] ?? trace.x;

for (const plot of plots) {
  const { data, layout } = JSON.parse(plot.nextElementSibling.textContent);
  layout.xaxis.nticks = narrow.matches ? 5 : 8;
  Plotly.newPlot(plot, data, layout, config);
}

const bySteps = plots.filter(plot => plot.dataset.x === "steps");
const axisButtons = [...document.querySelectorAll("button[data-axis]")];
function choose(axis) {
  for (const button of axisButtons) button.setAttribute("aria-pressed", button.dataset.axis === axis);
  sessionStorage.setItem(axisKey, axis);
  return Promise.all(bySteps.map(plot => Plotly.update(plot, { x: plot.data.map(trace => xOf(trace, axis)) },
    { "xaxis.title.text": axis, "xaxis.autorange": true })));
}
for (const button of axisButtons) button.addEventListener("click", () => choose(button.dataset.axis));
const chosen = sessionStorage.getItem(axisKey);
if (axisButtons.length) choose(chosen in axes ? chosen : axisButtons[0].dataset.axis);

// A zoom along the chosen axis is one of all plots that have it.
let following = false;
for (const plot of bySteps) plot.on("plotly_relayout", async change => {
  const from = change["xaxis.range[0]"], to = change["xaxis.range[1]"], all = change["xaxis.autorange"];
  if (following || (from === undefined && !all)) return;
  following = true;
  const same = all ? { "xaxis.autorange": true } : { "xaxis.range": [from, to] };
  await Promise.all(bySteps.filter(other => other !== plot).map(other => Plotly.relayout(other, same)));
  following = false;
});

// The name of a run in the legend shows or hides it in all plots.
for (const button of document.querySelectorAll("button.run")) button.addEventListener("click", () => {
  const shown = button.getAttribute("aria-pressed") !== "true";
  button.setAttribute("aria-pressed", shown);
  for (const plot of plots) {
    const places = plot.data.map((trace, i) => trace.legendgroup === button.dataset.run ? i : -1).filter(i => i >= 0);
    if (places.length) Plotly.restyle(plot, { visible: shown }, places);
  }
});

// While the run trains the page reloads itself, and keeps what was opened. Not while somebody looks into a plot.
const written = Number(document.body.dataset.written);
const key = "opened:" + location.pathname;
for (const id of JSON.parse(sessionStorage.getItem(key) ?? "[]")) document.getElementById(id)?.setAttribute("open", "");
if (written) setInterval(() => {
  const minutes = Math.floor((Date.now() / 1000 - written) / 60);
  if (minutes >= 10) document.getElementById("age").textContent =
    `No news for ${minutes} minutes: the run, or this page's updates, may have ended.`;
  if (document.hidden || plots.some(plot => plot.layout.xaxis.autorange === false)) return;
  sessionStorage.setItem(key, JSON.stringify([...document.querySelectorAll("details[open]")].map(x => x.id)));
  location.reload();
}, 30000);
