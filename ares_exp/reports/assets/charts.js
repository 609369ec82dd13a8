// SVG charts of the numbers in the payload.

const MOST_TASKS = 60;

function scale(low, high, from, to) {
  const width = high - low || 1;
  return (value) => from + ((value - low) / width) * (to - from);
}

function ticks(low, high, many = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / many, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough) || rough;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

function picture(title, width, height, parts, note) {
  return el("figure", { class: "picture" }, el("figcaption", null, title),
    el("div", { class: "scroll" },
      el("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": title }, parts)),
    note ? el("p", { class: "note" }, note) : null);
}

function label(x, y, text, attributes = {}) {
  return el("text", { x, y, ...attributes }, text);
}

function dot(x, y, name, title, attributes = {}) {
  return el("circle", { cx: x, cy: y, r: 4, class: "mark " + name, ...attributes }, el("title", null, title));
}

function grid(at, from, to, values, format, isVertical) {
  return values.map((value) => {
    const place = at(value);
    return isVertical
      ? [el("line", { x1: place, x2: place, y1: from, y2: to, class: "grid" }), label(place, to + 14, format(value), { class: "axis", "text-anchor": "middle" })]
      : [el("line", { x1: from, x2: to, y1: place, y2: place, class: "grid" }), label(from - 6, place + 4, format(value), { class: "axis", "text-anchor": "end" })];
  });
}

function go(address) { return { class: "link", onclick: () => { location.hash = address; } }; }

// Widths of charts. On a phone, charts are narrower, but their labels keep the same size.
function wide(most) { return PHONE.matches ? Math.min(most, Math.max(300, innerWidth - 24)) : most; }
function names() { return PHONE.matches ? { left: 120, chars: 15 } : { left: 190, chars: 26 }; }

// Sorts tasks from best to worst, so that all charts have the same order of rows.
function byResult(tasks) {
  return [...tasks].sort((a, b) => (b.mean_reward ?? -Infinity) - (a.mean_reward ?? -Infinity) || a.task_name.localeCompare(b.task_name));
}

// Mean reward of each task with its interval, sorted. Each attempt has a tick, and flaky tasks are marked.
function rewardByTask(run, index) {
  const tasks = byResult(run.results.tasks).filter((one) => one.mean_reward !== null);
  if (!tasks.length) return null;
  const { left, chars } = names(), width = wide(640), rows = tasks.slice(0, MOST_TASKS), height = 40 + rows.length * 18;
  const rewards = tasks.flatMap((one) => one.rewards).filter((one) => one !== null);
  const at = scale(Math.min(0, ...rewards), Math.max(1, ...rewards), left, width - 20);
  const parts = [grid(at, 4, height - 22, ticks(Math.min(0, ...rewards), Math.max(1, ...rewards)), number, true)];
  rows.forEach((task, row) => {
    const y = 24 + row * 18, [low, high] = run.intervals[task.task_name] || [null, null];
    parts.push(el("g", go(filtered(index, `task="${task.task_name}"`)),
      label(left - 10, y + 4, oneLine(task.task_name, chars) + (task.flaky ? " ≈" : ""), { class: "name", "text-anchor": "end" }),
      low === null ? null : el("line", { x1: at(low), x2: at(high), y1: y, y2: y, class: "interval" }),
      task.rewards.map((one) => one === null ? null : el("line", { x1: at(one), x2: at(one), y1: y - 5, y2: y + 5, class: "tick" })),
      dot(at(task.mean_reward), y, task.flaky ? "partly" : task.mean_reward >= run.results.statistics.threshold ? "passed" : task.mean_reward > 0 ? "partly" : "failed",
        `${task.task_name}: ${task.mean_reward}${low === null ? "" : ` [${low}, ${high}]`}, ${task.passed} of ${task.scored} passed${task.flaky ? ", flaky" : ""}`)));
  });
  const more = tasks.length - rows.length;
  return picture("Reward by task", width, height, parts,
    `Each line is the confidence interval of one task's mean reward. ≈ marks a flaky task.${more > 0 ? ` The table has ${number(more)} more tasks.` : ""}`);
}

// Heat map of attempts × tasks. A click opens the episode.
function heatMap(run, index) {
  const rows = run.episodes.filter((one) => one.is_last), ordered = byResult(run.results.tasks).map((one) => one.task_name);
  const tasks = [...new Set([...ordered, ...rows.map((one) => one.task_name)])];
  const attempts = Math.max(...rows.map((one) => one.attempt)) + 1;
  if (!rows.length || !isFinite(attempts)) return null;
  const { left, chars } = names(), across = Math.min(attempts, 200), size = across > 40 ? 10 : 18, down = tasks.slice(0, 300), top = 16;
  const place = new Map(down.map((task, row) => [task, row]));
  const parts = [label(left - 10, 11, "task ↓", { class: "axis", "text-anchor": "end" }), label(left, 11, across > 2 ? `attempt 0 to ${across - 1} →` : "attempt →", { class: "axis" }),
    down.map((task, row) => label(left - 10, top + 3 + row * size + size / 2, oneLine(task, chars), { class: "name", "text-anchor": "end" }))];
  for (const row of rows) {
    if (!place.has(row.task_name) || row.attempt >= across) continue;
    parts.push(el("rect", { x: left + row.attempt * size, y: top + place.get(row.task_name) * size, width: size - 2, height: size - 2, rx: 2,
      ...go(episodeAddress(index, row.episode_id)), class: "link mark " + verdict(row, run.results.statistics.threshold),
      style: row.reward > 0 && row.reward < 1 ? { "fill-opacity": String(0.35 + 0.6 * row.reward) } : {} },
      el("title", null, `${row.task_name}, attempt ${row.attempt}: ${row.outcome}, reward ${row.reward ?? none}`)));
  }
  return put(picture("Attempts", Math.max(left + across * size + 10, 300), top + 8 + down.length * size, parts,
    "The best tasks are first. Click an attempt to read it." + (tasks.length > down.length || attempts > across ? " The table has all attempts." : "")), [legend()]);
}

// pass@k and pass^k with their intervals.
function passRates(run) {
  const rates = run.results.statistics.scored_only.pass_rates.filter((one) => one.pass_at_k);
  if (rates.length < 2) return null;
  const width = wide(420), height = 230, x = scale(0, rates.length - 1, 50, width - 60), y = scale(0, 1, height - 30, 14);
  const parts = [grid(y, 44, width - 20, [0, 0.25, 0.5, 0.75, 1], number, false),
    rates.map((one, at) => label(x(at), height - 10, `k=${one.k}`, { class: "axis", "text-anchor": "middle" }))];
  for (const [key, name, style] of [["pass_at_k", "pass@k", "series1"], ["pass_hat_k", "pass^k", "series2"]]) {
    const points = rates.map((one, at) => [x(at), one[key]]).filter(([, one]) => one);
    const bounded = points.filter(([, one]) => one.low !== null);
    parts.push(el("polygon", { class: "band " + style, points: [...bounded.map(([at, one]) => `${at},${y(one.high)}`), ...bounded.map(([at, one]) => `${at},${y(one.low)}`).reverse()].join(" ") }));
    parts.push(el("polyline", { class: "line " + style, points: points.map(([at, one]) => `${at},${y(one.value)}`).join(" ") }));
    parts.push(points.map(([at, one]) => dot(at, y(one.value), style, `${name}: ${one.value} [${one.low}, ${one.high}], ${count(one.tasks, "task")}`)));
    const [end, last] = points[points.length - 1];
    parts.push(label(end + 8, y(last.value) + (key === "pass_at_k" ? -2 : 10), name, { class: "axis" }));
  }
  return picture("pass@k and pass^k", width, height, parts, "Only scored attempts. Bands are 95 % intervals.");
}

// Stacked bars with the outcomes of each task.
function outcomeBars(run) {
  const rows = run.episodes.filter((one) => one.is_last), by = new Map();
  for (const row of rows) {
    const own = by.get(row.task_name) || {}, name = verdict(row, run.results.statistics.threshold);
    own[name] = (own[name] || 0) + 1;
    by.set(row.task_name, own);
  }
  const tasks = [["all", Object.fromEntries(Object.keys(VERDICTS).map((name) => [name, sum([...by.values()].map((one) => one[name]))]))],
    ...[...new Set([...byResult(run.results.tasks).map((one) => one.task_name), ...by.keys()])].filter((task) => by.has(task)).slice(0, 40).map((task) => [task, by.get(task)])];
  const width = wide(420), { left, chars } = PHONE.matches ? names() : { left: 170, chars: 23 }, height = 26 + tasks.length * 18;
  const parts = tasks.map(([task, own], row) => {
    const whole = sum(Object.values(own)), y = 6 + row * 18;
    let at = left;
    return [label(left - 8, y + 11, task === "all" && row === 0 ? "all tasks" : oneLine(task, chars), { class: "name", "text-anchor": "end" }),
      Object.keys(VERDICTS).filter((name) => own[name]).map((name) => {
        const long = (own[name] / whole) * (width - left - 10), from = at;
        at += long;
        return el("rect", { x: from, y, width: Math.max(long - 1, 1), height: 14, class: "mark " + name }, el("title", null, `${task}: ${own[name]} ${VERDICTS[name]}`));
      })];
  });
  return put(picture("Outcomes", width, height, parts), [legend()]);
}

function legend() {
  return el("p", { class: "legend" }, Object.entries(VERDICTS).map(([name, words]) => el("span", null, el("i", { class: "swatch " + name }), " ", words)));
}

// Reward against cost in US dollars, or against tokens if no episode has a cost.
function costAndReward(run, index) {
  const rows = run.episodes.filter((one) => one.is_last && one.reward !== null && one.reward !== undefined);
  const priced = rows.some((one) => one.cost > 0);
  const spent = (one) => (priced ? one.cost : (one.prompt_tokens || 0) + (one.generated_tokens || 0)) || 0;
  if (rows.length < 2 || !rows.some(spent)) return null;
  const width = wide(420), height = 230, most = Math.max(...rows.map(spent)), rewards = rows.map((one) => one.reward);
  const x = scale(0, most, 50, width - 20), y = scale(Math.min(0, ...rewards), Math.max(1, ...rewards), height - 40, 14);
  return picture(priced ? "Cost and reward" : "Tokens and reward", width, height, [
    grid(x, 14, height - 34, ticks(0, most, 4), priced ? dollars : number, true),
    grid(y, 44, width - 20, ticks(Math.min(0, ...rewards), Math.max(1, ...rewards)), number, false),
    rows.slice(0, 3000).map((row) => dot(x(spent(row)), y(row.reward), verdict(row, run.results.statistics.threshold),
      `${row.task_name}, attempt ${row.attempt}: reward ${row.reward}, ${priced ? dollars(spent(row)) : number(spent(row)) + " tokens"}`, { onclick: () => { location.hash = episodeAddress(index, row.episode_id); } }))]);
}

function histogram(title, values, format) {
  const known = values.filter((one) => typeof one === "number" && isFinite(one));
  if (known.length < 2 || Math.max(...known) === Math.min(...known)) return null;
  const width = 300, height = 150, low = Math.min(...known), high = Math.max(...known), many = Math.min(24, Math.max(5, Math.ceil(Math.sqrt(known.length))));
  const bins = new Array(many).fill(0);
  for (const one of known) bins[Math.min(many - 1, Math.floor(((one - low) / (high - low)) * many))] += 1;
  const x = scale(0, many, 36, width - 10), y = scale(0, Math.max(...bins), height - 26, 10);
  return picture(title, width, height, [
    grid(y, 34, width - 10, ticks(0, Math.max(...bins), 3).filter(Number.isInteger), number, false),
    bins.map((one, at) => el("rect", { x: x(at), y: y(one), width: x(1) - x(0) - 1, height: height - 26 - y(one), class: "bar" },
      el("title", null, `${format(low + ((high - low) * at) / many)} to ${format(low + ((high - low) * (at + 1)) / many)}: ${one}`))),
    label(36, height - 10, format(low), { class: "axis" }), label(width - 10, height - 10, format(high), { class: "axis", "text-anchor": "end" })]);
}

function histograms(run) {
  const rows = run.episodes.filter((one) => one.is_last);
  return [histogram("Steps", rows.map((one) => one.num_steps), number),
    histogram("Tokens", rows.map((one) => (one.prompt_tokens || 0) + (one.generated_tokens || 0)), number),
    histogram("Cost", rows.map((one) => one.cost), dollars),
    histogram("Seconds", rows.map((one) => one.seconds), seconds)];
}

// Timeline of a run: one bar per episode, in as few rows as possible without overlaps.
function runTimeline(run, index) {
  const rows = [...run.episodes].filter((one) => typeof one.from === "number").sort((a, b) => a.from - b.from).slice(0, 3000);
  if (!rows.length) return null;
  const end = Math.max(...rows.map((one) => one.from + one.seconds)), ends = [], width = wide(960), x = scale(0, end, 40, width - 20);
  const placed = rows.map((row) => {
    let lane = ends.findIndex((one) => one <= row.from + 1e-6);
    if (lane < 0) lane = ends.length;
    ends[lane] = row.from + row.seconds;
    return [row, lane];
  });
  const high = ends.length > 40 ? 6 : 16, height = 30 + ends.length * high;
  return picture("Episodes over time", width, height, [
    grid(x, 4, height - 22, ticks(0, end, PHONE.matches ? 4 : 8), seconds, true),
    placed.map(([row, lane]) => el("rect", { x: x(row.from), y: 6 + lane * high, width: Math.max(x(row.from + row.seconds) - x(row.from) - 1, 2), height: high - 2, rx: 2,
      onclick: () => { location.hash = episodeAddress(index, row.episode_id); }, class: "link mark " + verdict(row, run.results.statistics.threshold) + (row.is_last ? "" : " retried") },
      el("title", null, `${row.task_name}, attempt ${row.attempt}${row.retry ? `, retry ${row.retry}` : ""}: ${row.outcome}, from ${seconds(row.from)}, ${seconds(row.seconds)}`)))],
    `${count(ends.length, "row")}: so many episodes at once. Faded ones were tried again.`);
}

// Timeline of an episode: start, policy, environment with its commands, and verification.
function episodeTimeline(episode, row, onstep) {
  const steps = episode.steps, width = wide(960), lanes = ["policy", "environment", "commands"], total = Math.max(episode.seconds, steps.length ? steps[steps.length - 1].at : 0, 1e-3);
  if (!steps.length) return null;
  const x = scale(0, total, 90, width - 20), bars = [], spend = (row && row.phase_sec) || {};
  const bar = (lane, from, long, style, title, step) => {
    if (!(long > 0)) return;
    bars.push(el("rect", { x: x(Math.max(from, 0)), y: 8 + lane * 20, width: Math.max(x(long) - x(0), 1), height: 16, class: "mark link " + style, onclick: () => onstep(step) }, el("title", null, title)));
  };
  steps.forEach((step, position) => {
    const own = step.environment_sec || 0, from = step.at - own;
    if (step.policy_sec) bar(0, from - step.policy_sec, step.policy_sec, "series1", `step ${step.index}: policy ${seconds(step.policy_sec)}`, position);
    bar(1, from, own, position === 0 ? "series3" : "series2", `step ${step.index}: ${position === 0 ? "start of the environment" : "environment"} ${seconds(own)}`, position);
    let at = from;
    for (const command of step.commands || []) {
      bar(2, at, Math.max(command.duration_sec, total / 2000), command.exit_code === 0 ? "passed" : "failed", `${ended(command)}, ${seconds(command.duration_sec)}: ${oneLine(command.command, 200)}`, position);
      at += command.duration_sec;
    }
  });
  if (spend.verify) bar(1, Math.min(total, steps[steps.length - 1].at) - spend.verify, spend.verify, "series4", `verifier ${seconds(spend.verify)}`, steps.length - 1);
  const told = Object.entries(spend).filter(([, long]) => long > 0).map(([name, long]) => `${name} ${seconds(long)}`).join(" · ");
  return picture("Time", width, 92, [grid(x, 4, 68, ticks(0, total, PHONE.matches ? 4 : 8), seconds, true), lanes.map((name, at) => label(84, 20 + at * 20, name, { class: "axis", "text-anchor": "end" })), bars],
    (told ? `Seconds by phase: ${told}. ` : "") + "Commands are drawn one after another, because only their durations are recorded.");
}

// Tree of branches: each recorded episode is shown below the episode that it continues.
function branchTree(runs) {
  const nodes = new Map();
  runs.forEach((run, index) => (run.episodes || []).forEach((row) => nodes.set(row.episode_id, { row, index, run, children: [] })));
  const branched = [...nodes.values()].filter((one) => one.row.lineage && typeof one.row.lineage.parent === "string");
  if (!branched.length) return null;
  const roots = new Set();
  for (const node of branched) {
    const parent = node.row.lineage.parent;
    if (!nodes.has(parent)) nodes.set(parent, { row: { episode_id: parent, task_name: "", attempt: "", outcome: "lost", reward: null }, isElsewhere: true, index: null, run: node.run, children: [] });
    nodes.get(parent).children.push(node);
  }
  for (const node of nodes.values()) if (node.children.length && !(node.row.lineage && node.row.lineage.parent)) roots.add(node);
  const lines = [], parts = [], seen = new Set();
  const place = (node, depth) => {
    if (seen.has(node) || lines.length > 1000) return null;
    seen.add(node);
    const y = 16 + lines.length * 22, step = node.row.lineage ? Number(node.row.lineage.step) || 0 : 0, x = 20 + depth * 90;
    lines.push(node);
    parts.push(dot(x, y, verdict(node.row, node.run.results.statistics.threshold), node.row.episode_id));
    parts.push(el("g", node.index === null ? null : go(episodeAddress(node.index, node.row.episode_id, node.row.lineage ? step : null)),
      label(x + 10, y + 4, `${node.row.lineage ? `@${step} ` : ""}${oneLine(node.row.episode_id, 60)}  ${node.isElsewhere ? "(in another run)" : `${node.row.outcome}, reward ${node.row.reward ?? none}`}`, { class: "name" })));
    for (const child of node.children.sort((a, b) => a.row.attempt - b.row.attempt)) {
      const at = place(child, depth + 1);
      if (at !== null) parts.push(el("path", { d: `M${x},${y + 5} V${at} H${x + 84}`, class: "branch" }));
    }
    return y;
  };
  for (const root of roots) place(root, 0);
  return picture("Branches", 900, 20 + lines.length * 22, parts, "@n is the step at which a branch starts. Rewards are final rewards.");
}

// Comparison of two runs: for each task in both runs, a line from A's mean reward to B's mean reward.
function pairedDots(tasks) {
  const rows = [...tasks].sort((a, b) => b.difference - a.difference).slice(0, 120);
  if (!rows.length) return null;
  const width = wide(640), { left, chars } = names(), values = rows.flatMap((one) => [one.a, one.b]), low = Math.min(0, ...values), high = Math.max(1, ...values);
  const x = scale(low, high, left, width - 20), height = 30 + rows.length * 18;
  return picture("Each task in both runs", width, height, [grid(x, 4, height - 22, ticks(low, high), number, true),
    rows.map((task, at) => {
      const y = 14 + at * 18, name = task.difference > 0 ? "passed" : task.difference < 0 ? "failed" : "cut";
      return [label(left - 10, y + 4, oneLine(task.task_name, chars), { class: "name", "text-anchor": "end" }),
        el("line", { x1: x(task.a), x2: x(task.b), y1: y, y2: y, class: "pairing " + name }),
        el("circle", { cx: x(task.a), cy: y, r: 4, class: "hollow " + name }, el("title", null, `A: ${task.a}`)), dot(x(task.b), y, name, `B: ${task.b}`)];
    })], "The hollow dot is A, the filled dot is B. An attempt without a reward counts as zero.");
}

// Jobs of a sweep: a heat map for two keys, otherwise parallel coordinates.
function sweepMap(sweep) {
  const jobs = sweep.jobs.filter((one) => one.objective !== null), keys = sweep.keys;
  if (!jobs.length || !keys.length) return null;
  const low = Math.min(...jobs.map((one) => one.objective)), high = Math.max(...jobs.map((one) => one.objective));
  const shade = (job, most = 0.85) => String(0.15 + most * (high > low ? (job.objective - low) / (high - low) : 1));
  const valuesOf = (key) => [...new Set(jobs.map((one) => one.overrides[key] ?? none))].sort((a, b) => compareValues(isNaN(a) ? a : Number(a), isNaN(b) ? b : Number(b)));
  const title = (job) => `${job.job}: ${Object.entries(job.overrides).map(([key, value]) => `${key}=${value}`).join(" ")}: ${job.objective}`;
  const open = (job) => (job.run === undefined || job.run === null ? {} : go(runAddress(job.run, "overview")));
  if (keys.length === 2) {
    const [across, down] = keys.map(valuesOf), left = 150, cell = 64, rows = 30;
    return picture(`${sweep.objective} by ${keys[0]} and ${keys[1]}`, Math.max(left + across.length * cell + 20, 300), 60 + down.length * rows, [
      label(left, 14, keys[0] + " →", { class: "name" }), label(left - 8, 34, oneLine(keys[1], 20) + " ↓", { class: "name", "text-anchor": "end" }),
      across.map((value, at) => label(left + at * cell + cell / 2, 34, oneLine(value, 10), { class: "axis", "text-anchor": "middle" })),
      down.map((value, at) => label(left - 8, 62 + at * rows, oneLine(value, 18), { class: "axis", "text-anchor": "end" })),
      jobs.map((job) => {
        const x = left + across.indexOf(job.overrides[keys[0]] ?? none) * cell, y = 44 + down.indexOf(job.overrides[keys[1]] ?? none) * rows;
        return el("g", open(job), el("rect", { x, y, width: cell - 3, height: rows - 3, rx: 3, class: "bar" + (job.job === sweep.best ? " best" : ""), style: { "fill-opacity": shade(job, 0.4) } }, el("title", null, title(job))),
          label(x + cell / 2, y + 18, number(job.objective), { class: "incell", "text-anchor": "middle" }));
      })]);
  }
  const axes = [...keys, sweep.objective], width = Math.max(420, axes.length * 170), x = scale(0, axes.length - 1, 60, width - 70), height = 260;
  const places = keys.map((key) => { const all = valuesOf(key), y = scale(0, Math.max(all.length - 1, 1), height - 30, 40); return { all, y }; });
  const y = scale(low, high, height - 30, 40);
  return picture(`${sweep.objective} by ${keys.join(", ")}`, width, height, [
    axes.map((name, at) => [el("line", { x1: x(at), x2: x(at), y1: 34, y2: height - 24, class: "grid" }), label(x(at), 18, oneLine(name, 24), { class: "name", "text-anchor": "middle" }),
      (at < keys.length ? places[at].all.map((value, n) => [value, places[at].y(n)]) : ticks(low, high, 4).map((value) => [number(value), y(value)])).slice(0, 40).map(([value, place]) => label(x(at) + 6, place + 4, oneLine(value, 14), { class: "axis" }))]),
    jobs.map((job) => el("polyline", { ...open(job), class: "link path" + (job.job === sweep.best ? " best" : ""), style: { "stroke-opacity": shade(job) },
      points: [...keys.map((key, at) => `${x(at)},${places[at].y(places[at].all.indexOf(job.overrides[key] ?? none))}`), `${x(keys.length)},${y(job.objective)}`].join(" ") }, el("title", null, title(job))))]);
}
