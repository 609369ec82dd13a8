// The views of a run, a pair of runs and a sweep.

const tableStates = {};
function stateOf(name) { return (tableStates[name] ??= {}); }

// Returns the part of an address that identifies a run: its path on a live page (where runs change) or its number.
function runName(index) {
  const run = payload.runs[index];
  return payload.live && run ? encodeURIComponent(shown(run.key)) : String(index);
}

function runIndex(name) {
  if (payload.live) return payload.runs.findIndex((one) => shown(one.key) === name);
  return /^\d+$/.test(name) ? Number(name) : -1;
}

function runAddress(index, view) { return `#/${runName(index)}/${view}`; }

function episodeAddress(index, id, step) {
  return `#/${runName(index)}/e/${encodeURIComponent(id)}${step === null || step === undefined ? "" : "@" + step}`;
}

const NAMED_REWARDS = 4;

// Returns the columns of the table of episodes, including `NAMED_REWARDS` rewards that at least half of them have.
function episodeColumns(index, run) {
  const threshold = run.results.statistics.threshold, link = (row) => el("a", { href: episodeAddress(index, row.episode_id), title: row.episode_id }, oneLine(row.task_name, 60));
  const tokens = (row) => (row.prompt_tokens || 0) + (row.generated_tokens || 0);
  const columns = [
    { key: "task", name: "task", get: (row) => row.task_name, show: link },
    { key: "attempt", name: "attempt", isNumber: true, get: (row) => row.attempt },
    { key: "outcome", name: "outcome", get: (row) => row.outcome },
    { key: "reward", name: "reward", isNumber: true, get: (row) => row.reward, show: (row) => figure(row.reward, score) },
    { key: "verdict", name: "verdict", get: (row) => VERDICTS[verdict(row, threshold)], show: (row) => badge(row, threshold) },
    { key: "steps", name: "steps", isNumber: true, get: (row) => row.num_steps },
    { key: "tokens", name: "tokens", isNumber: true, get: tokens },
    { key: "cost", name: "cost", isNumber: true, get: (row) => row.cost, show: (row) => figure(row.cost, dollars) },
    { key: "seconds", name: "seconds", isNumber: true, get: (row) => row.seconds, show: (row) => figure(row.seconds, (value) => (value ?? 0).toFixed(1)) },
    { key: "error", name: "error", get: (row) => (row.error ? `${row.error.type}: ${row.error.message}` : null), show: (row) => (row.error ? el("span", { class: "problem", title: row.error.message }, oneLine(`${row.error.type}: ${row.error.message}`, 60)) : "") },
    { key: "retry", name: "retry", isNumber: true, get: (row) => row.retry || 0 },
    { key: "model", name: "model", get: (row) => row.model },
    { key: "cause", isHidden: true, get: (row) => cause(row, threshold) },
    { key: "id", name: "episode", get: (row) => row.episode_id, show: (row) => el("span", { class: "dim", title: row.episode_id }, oneLine(row.episode_id, 40)) },
  ];
  const named = [...new Set(run.episodes.flatMap((row) => Object.keys(row.rewards || {})))].filter((name) => name !== "reward" && 2 * run.episodes.filter((row) => name in (row.rewards || {})).length >= run.episodes.length);
  const valueOf = (name) => (row) => (row.rewards || {})[name];
  columns.splice(4, 0, ...named.slice(0, NAMED_REWARDS).map((name) => ({ key: "rewards." + name, name, isNumber: true, get: valueOf(name), show: (row) => figure(valueOf(name)(row), score) })));
  const seen = { cost: (row) => row.cost, tokens, error: (row) => row.error, retry: (row) => row.retry, model: (row) => row.model };
  return columns.filter((column) => !seen[column.key] || run.episodes.some(seen[column.key]));
}

// Returns the address of the table of episodes with a filter.
function filtered(index, query) {
  return runAddress(index, "episodes") + (query ? "?q=" + encodeURIComponent(query) : "");
}

function episodesTable(index, run, query) {
  const state = stateOf(runName(index) + "/episodes");
  if (query !== undefined) state.query = query;
  return table("episodes", episodeColumns(index, run), run.episodes, { state, thing: "episode", example: "outcome:error reward<1 task:fix", sort: { key: "task", down: false },
    onchange: (now) => { if (route().view === "episodes") remember(filtered(index, now.query)); } });
}

// Removes the columns of tokens, cost, message, model and sweep for which no row has a value.
function spent(columns, rows) {
  return columns.filter((column) => !["tokens", "cost", "message", "model", "sweep"].includes(column.key) || rows.some(column.get));
}

function tasksTable(index, run) {
  const interval_ = (row) => run.intervals[row.task_name] || [null, null];
  const columns = [
    { key: "task", name: "task", get: (row) => row.task_name, show: (row) => el("a", { href: filtered(index, `task="${row.task_name}"`) }, oneLine(row.task_name, 80)) },
    { key: "attempts", name: "attempts", isNumber: true, get: (row) => row.attempts },
    { key: "passed", name: "passed", isNumber: true, get: (row) => row.passed },
    { key: "reward", name: "mean reward", isNumber: true, get: (row) => row.mean_reward, show: (row) => interval({ value: row.mean_reward, low: interval_(row)[0], high: interval_(row)[1] }) },
    { key: "flaky", name: "flaky", get: (row) => (row.flaky ? "flaky" : ""), },
    { key: "outcomes", name: "outcomes", get: (row) => Object.entries(row.outcomes).map(([name, many]) => `${many} ${name}`).join(", ") },
    { key: "errors", name: "errors", get: (row) => Object.entries(row.errors).map(([name, many]) => `${many} ${name}`).join(", ") },
    { key: "steps", name: "steps", isNumber: true, get: (row) => row.num_steps },
    { key: "tokens", name: "tokens", isNumber: true, get: (row) => row.tokens },
    { key: "cost", name: "cost", isNumber: true, get: (row) => row.cost, show: (row) => figure(row.cost, dollars) },
    { key: "seconds", name: "seconds", isNumber: true, get: (row) => row.seconds },
  ];
  return table("tasks", spent(columns, run.results.tasks), run.results.tasks, { state: stateOf(runName(index) + "/tasks"), thing: "task", example: "flaky:flaky reward<1" });
}

function card(name, value, note) {
  return el("div", { class: "card" }, el("span", { class: "name" }, name), el("span", { class: "value" }, value), note ? el("span", { class: "note" }, note) : null);
}

function overview(index, run) {
  const { totals, statistics } = run.results, scored = statistics.scored_only, zero = statistics.errors_as_zero, state = run.state;
  const running = run.episodes.filter((one) => one.outcome === "running"), tokens = (totals.prompt_tokens || 0) + (totals.generated_tokens || 0);
  const told = [...run.about, state.started ? `started ${moment(state.started)}` : null, state.sessions > 1 ? count(state.sessions, "session") : null, totals.ended_by, totals.interrupted ? "interrupted" : null].filter((one) => one).join(" · ");
  return el("div", null, el("h2", null, run.name, " ", el("span", { class: "badge state " + state.name.replace(" ", "-") }, state.name)), factsOf(run), el("p", { class: "dim" }, told),
    liveBox(index, run),
    el("div", { class: "cards" },
      card("mean reward", interval(scored.mean_reward), scored.mean_reward ? `over ${number(scored.attempts)} scored${scored.mean_reward.unit === "attempts" ? ", of one task" : ""}` : "no reward yet"),
      zero.attempts > scored.attempts ? card("errors as zero", interval(zero.mean_reward), `over all ${number(zero.attempts)}`) : null,
      card("episodes", el("span", null, figure(totals.finished), " of ", figure(totals.planned)), running.length ? `${number(running.length)} running` : statistics.retried ? `${number(statistics.retried)} retried` : "finished"),
      card("tasks", figure(run.results.tasks.length), statistics.flaky && statistics.flaky.length ? `${number(statistics.flaky.length)} flaky` : null),
      tokens ? card("tokens", figure(tokens), `${number(totals.generated_tokens)} generated`) : null,
      totals.cost ? card("cost", figure(totals.cost, dollars), `${dollars(statistics.cost.mean)} an episode`) : null,
      card("time", figure(run.elapsed_sec, seconds), state.name === "running" ? eta(run.status) : `median episode ${seconds(statistics.seconds.median)}`)),
    causes(index, run),
    run.problems.length ? fold(`${count(run.problems.length, "record")} cannot be read`, () => el("ul", null, run.problems.slice(0, 100).map((one) => el("li", null, one)))) : null,
    leftOut(index, run),
    el("div", { class: "pictures" }, rewardByTask(run, index), heatMap(run, index), outcomeBars(run), passRates(run), costAndReward(run, index)),
    el("h3", null, "Episodes"), episodesTable(index, run));
}

// Shows the facts of a run, and its command line with a button that copies it.
function factsOf(run) {
  const line = el("code", null, run.argv);
  const copy = el("button", { type: "button", onclick: async () => {
    getSelection().selectAllChildren(line);
    try { await navigator.clipboard.writeText(run.argv); replace(copy, "copied"); } catch { replace(copy, "press Ctrl-C"); }
  } }, "copy");
  return el("div", { class: "what" }, run.facts.length ? el("p", null, run.facts.join(" · ")) : null, run.argv ? el("p", null, line, " ", copy) : null);
}

// Estimates the remaining time of a running run from the average duration of its episodes so far.
function eta(status) {
  const done = status ? status.ended - status.cut_short : 0;
  if (status && (status.held || status.outage)) return "paused";
  return done > 0 && done < status.expected ? `ETA ${seconds(((status.written_at - status.started_at) / done) * (status.expected - done))}` : "ETA not known yet";
}

// Returns the reason why the last try of an attempt did not pass. Numbers are removed, so that similar reasons are grouped.
function cause(row, threshold) {
  const name = row.is_last ? verdict(row, threshold) : "passed";
  if (["passed", "running"].includes(name)) return null;
  return oneLine(shown(reason(row, threshold)).replace(/\d+/g, "…").replaceAll('"', "'"), 200);
}

function reason(row, threshold) {
  if (row.error) return row.error.type === "limit" ? row.error.message : `${row.error.type}: ${row.error.message}`;
  return row.outcome === "completed" ? `reward ${row.reward > 0 ? "above 0, below " + threshold : row.reward < 0 ? "below 0" : "0"}` : row.outcome;
}

const MOST_CAUSES = 12, BY_URGENCY = ["broken", "failed", "partly", "cut"];

function causes(index, run) {
  const { threshold } = run.results.statistics, found = new Map();
  for (const row of run.episodes) {
    const why = cause(row, threshold);
    if (why === null) continue;
    if (!found.has(why)) found.set(why, { row, why, many: 0, rank: BY_URGENCY.indexOf(verdict(row, threshold)) });
    found.get(why).many += 1;
  }
  const all = [...found.values()].sort((a, b) => a.rank - b.rank || b.many - a.many), more = all.length - MOST_CAUSES;
  return all.length ? el("section", { class: "causes" }, el("h3", null, "Look here first"), el("ul", { class: "first" }, all.slice(0, MOST_CAUSES).map((one) =>
    el("li", null, badge(one.row, threshold), " ", el("a", { href: filtered(index, `cause="${one.why}"`) }, `${number(one.many)} × ${oneLine(reason(one.row, threshold), 140)}`)))),
  more > 0 ? el("p", null, el("a", { href: filtered(index, "reward<" + threshold) }, `and ${count(more, "more cause")}`)) : null) : null;
}

// The state of a running run, from its `status.json`.
const WAITS = { start: "to start", policy: "for the policy", environment: "for the environment", end: "to be released" };
const MOST_LIVE = 50;

function liveBox(index, run) {
  const status = run.status;
  if (!status) return null;
  const held = status.held, waits = Object.entries(status.waiting).map(([what, many]) => `${WAITS[what]}: ${number(many)}`).join(", ");
  const episode = (one) => [el("a", { href: episodeAddress(index, one.episode_id) }, oneLine(one.task_name, 80)), el("span", { class: "dim" }, ` attempt ${one.attempt}, step ${number(one.num_steps)}, waits ${WAITS[one.waits_for]} for ${seconds(Math.max(status.written_at - one.since, 0))}`)];
  return el("section", { class: "live", "data-live": status.state }, el("h3", null, "Now"),
    el("p", null, `${status.state}: ${number(status.episodes.length)} of at most ${count(status.concurrency, "episode")}, ${number(status.queued)} queued`, waits ? `; waiting ${waits}` : "", el("span", { class: "dim" }, ` · written at ${moment(status.written_at)}`)),
    held ? el("p", { class: "problem" }, `paused by ${held.by}${held.now ? ", requests to the policy wait" : ""}${held.until ? `, until ${moment(held.until)}` : ""}${held.reason ? `: ${held.reason}` : ""}`) : null,
    status.outage ? el("p", { class: "problem" }, `paused: ${status.outage}`) : null,
    status.episodes.length ? fold(`${count(status.episodes.length, "running episode")}`, () => el("ul", null, status.episodes.slice(0, MOST_LIVE).map((one) => el("li", null, episode(one))))) : null);
}

function leftOut(index, run) {
  const rows = run.left_out || [];
  if (!rows.length) return null;
  return fold(`${count(rows.length, "trajectory").replace("trajectorys", "trajectories")} left out of this file`, () => el("div", null, el("p", null, "Tables and charts include all episodes. To read an episode that is not in this file, use its command:"),
    el("ul", { class: "commands" }, rows.slice(0, 500).map((one) => el("li", null, el("code", null, one.command), el("span", { class: "dim" }, ` ${one.why}`)))), rows.length > 500 ? el("p", null, `and ${number(rows.length - 500)} more`) : null));
}

function chartsView(index, run) {
  return el("div", { class: "pictures" }, rewardByTask(run, index), heatMap(run, index), outcomeBars(run), passRates(run), costAndReward(run, index), histograms(run));
}

function configView(index, run) {
  const pairs = (rows) => rows.map(([key, value]) => ({ key, value }));
  const columns = [{ key: "key", name: "key", get: (row) => row.key }, { key: "value", name: "value", get: (row) => row.value, show: (row) => block(row.value ?? "null") }];
  return el("div", null, el("h3", null, "Config"), table("config", columns, pairs(run.config), { state: stateOf(runName(index) + "/config"), thing: "key", example: "policy" }),
    el("h3", null, "Provenance"), table("provenance", columns, pairs(run.provenance), { state: stateOf(runName(index) + "/provenance"), thing: "fact", example: "commit" }),
    run.replay ? [el("h3", null, "Replay"), block(JSON.stringify(run.replay, null, 2))] : null,
    run.log ? [el("h3", null, "The end of run.log"), block(run.log)] : null);
}

function compareView(pair) {
  const [a, b] = [source.run(0), source.run(1)], difference = pair.errors_as_zero, rows = pair.tasks;
  const columns = [
    { key: "task", name: "task", get: (row) => row.task_name },
    { key: "a", name: "A", isNumber: true, get: (row) => row.a, show: (row) => figure(row.a, score) }, { key: "b", name: "B", isNumber: true, get: (row) => row.b, show: (row) => figure(row.b, score) },
    { key: "difference", name: "B − A", isNumber: true, get: (row) => row.difference, show: (row) => figure(row.difference, score) },
    { key: "passed_a", name: "A passed", get: (row) => `${row.a_passed}/${row.a_attempts}` }, { key: "passed_b", name: "B passed", get: (row) => `${row.b_passed}/${row.b_attempts}` },
    { key: "flipped", name: "flipped", get: (row) => (row.flipped ? "flipped" : "") },
    { key: "read", name: "", get: () => "", show: (row) => {
      const of = (run, index) => run.episodes.find((one) => one.task_name === row.task_name && one.is_last && source.has(index, one.episode_id)), left = of(a, 0), right = of(b, 1);
      return left && right ? el("a", { href: `#/diff/0/${encodeURIComponent(left.episode_id)}/1/${encodeURIComponent(right.episode_id)}` }, "side by side") : "";
    } }];
  return el("div", null, el("h2", null, "B against A"), el("p", { class: "verdict" }, pair.verdict), pair.advice ? el("p", { class: "dim" }, pair.advice) : null,
    el("p", null, "A is ", el("a", { href: "#/0/overview" }, a.name.replace(/^A: /, "")), ", B is ", el("a", { href: "#/1/overview" }, b.name.replace(/^B: /, "")), "."),
    el("div", { class: "cards" }, difference ? card("difference", interval(difference), `${difference.test}, p = ${number(difference.p)}`) : null, card("tasks in common", figure(rows.length)),
      card("flipped", figure(rows.filter((one) => one.flipped).length), "tasks with another pass rate"), card("mean reward of A", interval(a.results.statistics.errors_as_zero.mean_reward), "errors as zero"), card("mean reward of B", interval(b.results.statistics.errors_as_zero.mean_reward), "errors as zero")),
    pair.changed_tasks.length ? el("p", { class: "problem" }, `Tasks with different files in A and B: ${pair.changed_tasks.join(", ")}`) : null,
    pair.only_a.length || pair.only_b.length ? el("p", { class: "dim" }, `Not compared: ${count(pair.only_a.length, "task")} only in A, ${count(pair.only_b.length, "task")} only in B.`) : null,
    el("div", { class: "pictures" }, pairedDots(rows)), table("paired", columns, rows, { state: stateOf("pair"), thing: "task", example: "flipped:flipped", sort: { key: "difference", down: false } }),
    el("h3", null, "Differences in the config"), table("config-difference", [{ key: "key", name: "key", get: (row) => row.key }, { key: "a", name: "A", get: (row) => row.values[0] }, { key: "b", name: "B", get: (row) => row.values[1] }], pair.differing_config, { state: stateOf("pairconfig"), thing: "key", example: "policy" }));
}

function sweepView(sweep) {
  const columns = [{ key: "job", name: "job", get: (row) => row.job, show: (row) => (row.run === null || row.run === undefined ? row.job : el("a", { href: runAddress(row.run, "overview") }, row.job)) },
    ...sweep.keys.map((key) => ({ key, name: key, get: (row) => { const value = row.overrides[key]; return value !== undefined && value !== "" && !isNaN(value) ? Number(value) : value; } })),
    { key: "state", name: "state", get: (row) => row.state }, { key: "finished", name: "finished", isNumber: true, get: (row) => row.finished, show: (row) => `${row.finished}/${row.planned}` },
    { key: "objective", name: sweep.objective, isNumber: true, get: (row) => row.objective, show: (row) => interval({ value: row.objective, low: row.low, high: row.high }) },
    { key: "tokens", name: "tokens", isNumber: true, get: (row) => row.tokens }, { key: "cost", name: "cost", isNumber: true, get: (row) => row.cost, show: (row) => figure(row.cost, dollars) },
    { key: "message", name: "message", get: (row) => row.message }];
  const settings = [...sweep.keys.filter((key) => key !== sweep.over).map((key) => ({ key, name: key, get: (row) => row.overrides[key] })),
    { key: "jobs", name: "jobs", get: (row) => row.jobs.join(", ") }, { key: "finished", name: "finished", isNumber: true, get: (row) => row.finished, show: (row) => `${row.finished}/${row.planned}` },
    { key: "objective", name: sweep.objective, isNumber: true, get: (row) => row.objective, show: (row) => interval({ value: row.objective, low: row.low, high: row.high }) },
    { key: "lowest", name: "lowest job", isNumber: true, get: (row) => row.lowest, show: (row) => figure(row.lowest) }, { key: "highest", name: "highest job", isNumber: true, get: (row) => row.highest, show: (row) => figure(row.highest) }];
  const best = sweep.jobs.find((one) => one.job === sweep.best);
  return el("div", null, el("h2", null, `Sweep of ${count(sweep.jobs.length, "job")}`), el("p", { class: "dim" }, sweep.path),
    best ? el("p", { class: "verdict" }, `Best ${sweep.objective} (${sweep.minimize ? "lowest" : "highest"}): job ${best.job}, `, interval({ value: best.objective, low: best.low, high: best.high }), `, ${Object.entries(best.overrides).map(([key, value]) => `${key}=${value}`).join(" ")}`) : null,
    sweep.settings.length ? [el("h3", null, `Mean over ${sweep.over}`), table("settings", settings, sweep.settings, { state: stateOf("settings"), thing: "setting", example: "jobs:0", sort: { key: "objective", down: !sweep.minimize } })] : null,
    el("div", { class: "pictures" }, sweepMap(sweep)), table("jobs", spent(columns, sweep.jobs), sweep.jobs, { state: stateOf("sweep"), thing: "job", example: "state:complete", sort: { key: "objective", down: !sweep.minimize }, rowClass: (row) => (row.job === sweep.best ? "best" : null) }));
}

function runsView(runs) {
  const of = (row, key) => (row.summary ? row.summary[key] : null), errors = (row) => Math.max((of(row, "finished") || 0) - (of(row, "scored") || 0), 0);
  const columns = [
    { key: "run", name: "run", get: (row) => row.name, show: (row) => el("a", { href: runAddress(row.index, "overview") }, row.name) },
    { key: "sweep", name: "sweep", get: (row) => of(row, "sweep"), show: (row) => (of(row, "sweep") ?? "") },
    { key: "state", name: "state", get: (row) => of(row, "state"), show: (row) => el("span", { class: "badge state " + (of(row, "state") === "finished" && errors(row) ? (errors(row) < of(row, "finished") ? "incomplete" : "failed") : String(of(row, "state")).split(":")[0]) }, of(row, "state")) },
    ...["env", "agent", "policy", "model"].map((key) => ({ key, name: key, get: (row) => (of(row, "facts") || {})[key] })),
    { key: "episodes", name: "episodes", isNumber: true, get: (row) => of(row, "finished"), show: (row) => `${of(row, "finished") ?? none}/${of(row, "planned") ?? none}` },
    { key: "errors", name: "errors", isNumber: true, get: errors, show: (row) => (errors(row) ? el("b", { class: "problem" }, number(errors(row))) : "0") },
    { key: "reward", name: "mean reward", isNumber: true, get: (row) => of(row, "mean_reward"), show: (row) => figure(of(row, "mean_reward"), score) },
    { key: "cost", name: "cost", isNumber: true, get: (row) => of(row, "cost"), show: (row) => figure(of(row, "cost"), dollars) },
    { key: "seconds", name: "time", isNumber: true, get: (row) => of(row, "elapsed_sec"), show: (row) => figure(of(row, "elapsed_sec"), seconds) },
    { key: "started", name: "started", isNumber: true, get: (row) => of(row, "started"), show: (row) => (of(row, "started") ? moment(of(row, "started")) : none) },
  ];
  const rows = runs.map((run, index) => ({ ...run, index }));
  return el("div", null, el("h2", null, "Runs"), table("runs", spent(columns, rows), rows, { state: stateOf("runs"), thing: "run", example: "state:running", sort: { key: "started", down: true } }));
}

// Searches all available episodes for words, and shows results as they are found.
function searchView(index, run, words) {
  const input = el("input", { type: "search", class: "filter", value: words || "", placeholder: "words in any step", "aria-label": "search all episodes", onkeydown: (event) => { if (event.key === "Enter") location.hash = runAddress(index, "search") + `?q=${encodeURIComponent(input.value)}`; } });
  const list = el("ul", { class: "first" }), told = el("p", { class: "told", role: "status" });
  const node = el("div", null, el("h2", null, "Search"), input, told, list), wanted = (words || "").toLowerCase();
  async function look() {
    let hits = 0, read = 0;
    const rows = run.episodes.filter((one) => source.has(index, one.episode_id));
    for (const row of rows) {
      if (!node.isConnected && read) return;
      const episode = await source.episode(index, row.episode_id);
      read += 1;
      if (!episode) continue;
      episode.steps.forEach((step, n) => {
        const text = stepText(episode, step), at = text.toLowerCase().indexOf(wanted);
        if (at < 0 || ++hits > 500) return;
        list.append(el("li", null, el("a", { href: episodeAddress(index, row.episode_id, n) }, `${oneLine(row.task_name, 50)} attempt ${row.attempt} step ${step.index}`), el("span", { class: "dim" }, " … " + oneLine(text.slice(Math.max(0, at - 50), at + 110), 160))));
      });
      replace(told, (read < rows.length ? `searched ${number(read)} of ${count(rows.length, "episode")}, ` : "") + `${count(hits, "step")} found` + (read < rows.length ? " so far" : ` in ${count(rows.length, "episode")}`) + (hits > 500 ? "; the first 500 are shown" : ""));
    }
    if (!rows.length) replace(told, "No trajectories are available.");
  }
  if (wanted) setTimeout(look, 0);
  return { node, search: input };
}
