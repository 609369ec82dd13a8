// Formatting of numbers and words.

const none = "–";
const PHONE = matchMedia("(max-width: 560px)");

function number(value) {
  if (value === null || value === undefined) return none;
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return size >= 0.01 ? value.toFixed(2) : String(Number(value.toPrecision(3)));
}

function seconds(value) {
  if (value === null || value === undefined) return none;
  if (Math.abs(value) < 1) return Number(value.toPrecision(2)) + " s";
  if (value < 100) return value.toFixed(1) + " s";
  if (value < 3600) return `${Math.floor(value / 60)} min ${String(Math.round(value % 60)).padStart(2, "0")} s`;
  return `${Math.floor(value / 3600)} h ${String(Math.floor((value % 3600) / 60)).padStart(2, "0")} min`;
}

function dollars(value) {
  return value === null || value === undefined ? none : "$" + Number(value.toPrecision(4));
}

function bytes(value) {
  if (value < 1000) return value + " B";
  for (const unit of ["kB", "MB", "GB"]) {
    value /= 1000;
    if (value < 999.5) return Number(value.toPrecision(3)) + " " + unit;
  }
  return Number(value.toPrecision(3)) + " TB";
}

function moment(epoch) {
  const date = new Date(epoch * 1000);
  return isNaN(date) ? String(epoch) : date.toISOString().slice(0, 19).replace("T", " ") + " UTC";
}

function count(many, thing) {
  return `${number(many)} ${thing}${many === 1 ? "" : "s"}`;
}

// Shows a recorded number rounded. The exact value is in its title and, for programs, in `data-value`.
function figure(value, format = number) {
  return el("span", { class: "figure", title: value === null || value === undefined ? null : String(value),
    "data-value": value === null || value === undefined ? null : String(value) }, format(value));
}

function interval(estimate, format = score) {
  if (!estimate) return none;
  const bounds = estimate.low === null || estimate.high === null ? null
    : el("span", { class: "bounds" }, " [", figure(estimate.low, format), ", ", figure(estimate.high, format), "]");
  return el("span", null, figure(estimate.value, format), bounds);
}

// Formats a reward. An integer has two decimals.
function score(value) {
  return Number.isInteger(value) ? value.toFixed(2) : number(value);
}

// Returns the verdict on an episode: a key of `VERDICTS`.
function verdict(row, threshold) {
  if (row.outcome === "running") return "running";
  if (row.reward !== null && row.reward !== undefined)
    return row.reward >= threshold ? "passed" : row.reward > 0 ? "partly" : "failed";
  return ["cancelled", "lost", "abandoned", "closed"].includes(row.outcome) ? "cut" : "broken";
}

const VERDICTS = { passed: "passed", partly: "some reward", failed: "failed", broken: "error", cut: "interrupted",
  running: "running" };

function badge(row, threshold) {
  const name = verdict(row, threshold);
  return el("span", { class: "badge " + name, title: `${row.outcome}: ${VERDICTS[name]}` }, row.outcome === "completed" ? VERDICTS[name] : row.outcome || none);
}

function sum(values) { return values.reduce((total, one) => total + (one || 0), 0); }
