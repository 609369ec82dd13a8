// Routing, keyboard shortcuts, and updates of the page while a run is running.

const payload = JSON.parse(document.getElementById("payload").textContent);
const source = payload.live ? new Live(payload) : new Embedded(payload);
const page = document.getElementById("page"), main = el("main", { tabindex: -1 }), bar = el("nav", { class: "tabs", "aria-label": "views" });
const help = el("dialog", { class: "help" });
const POLL_MS = 2000;
let current = { keys: {} }, drawing = 0;

const HELP = [["j, k", "next, previous step"], ["n, p", "next, previous episode"], ["/", "filter, or find in the episode"], ["s", "search all episodes"], ["o, e, t, c, l", "overview, episodes, tasks, charts, timeline"],
  ["d", "dark or light"], ["?", "this help"], ["Esc", "close, leave the input"]];

function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?"), parts = path.split("/");
  const asked = new URLSearchParams(query || ""), decode = (text) => { try { return decodeURIComponent(text || ""); } catch { return text || ""; } };
  if (parts[0] === "diff" && parts.length === 5) return { view: "diff", a: [runIndex(decode(parts[1])), decode(parts[2])], b: [runIndex(decode(parts[3])), decode(parts[4])] };
  if (["compare", "sweep", "runs", "branches"].includes(parts[0]) && parts.length === 1) return { view: parts[0] };
  if (parts[0] === "" && payload.only) return { view: "episode", index: 0, id: payload.only, step: null };
  if (parts[0] === "") return { view: payload.pair ? "compare" : payload.sweep ? "sweep" : payload.live && payload.runs.length !== 1 ? "runs" : "overview", index: payload.pair || payload.sweep || payload.runs.length !== 1 ? undefined : 0, q: undefined };
  const index = runIndex(decode(parts[0]));
  if (parts[1] !== "e") return { view: parts[1] || "overview", index, q: asked.has("q") ? asked.get("q") : undefined };
  const whole = decode(parts.slice(2).join("/")), known = payload.runs[index] && (payload.runs[index].episodes || []).some((row) => row.episode_id === whole), found = known ? null : /^(.*)@(\d+)$/s.exec(whole);
  return { view: "episode", index, id: found ? found[1] : whole, step: found ? Number(found[2]) : null };
}

function tabs(now) {
  const index = now.index ?? -1, run = payload.runs[index], link = (view, name, address) => el("a", { href: address || runAddress(index, view), "aria-current": now.view === view ? "page" : null }, name);
  const many = payload.runs.length > 1 ? el("select", { "aria-label": "run", onchange: (event) => { location.hash = runAddress(Number(event.target.value), "overview"); } }, run ? null : el("option", { value: "-1" }, "choose a run"), payload.runs.map((one, n) => el("option", { value: String(n) }, oneLine(one.name, 70)))) : null;
  if (many) many.value = String(run ? index : -1);
  const hasTree = payload.runs.some((one) => (one.episodes || []).some((row) => row.lineage));
  replace(bar, el("b", { class: "mark-name" }, "ares-exp"), payload.live ? link("runs", "Runs", "#/runs") : null, payload.pair ? link("compare", "Compare", "#/compare") : null, payload.sweep ? link("sweep", "Sweep", "#/sweep") : null, many,
    run && !payload.only ? [link("overview", "Overview"), link("episodes", "Episodes"), link("tasks", "Tasks"), link("charts", "Charts"), link("timeline", "Timeline"), hasTree ? link("branches", "Branches") : null, link("search", "Search"), link("config", "Config")] : hasTree && !payload.only ? link("branches", "Branches", "#/branches") : null,
    el("button", { type: "button", class: "quiet", onclick: toggleTheme, title: "dark or light (d)" }, "◐"), el("button", { type: "button", class: "quiet", onclick: () => help.showModal(), title: "keys (?)" }, "?"));
}

function neighbours(index, run, id) {
  const rows = run.episodes.filter((one) => source.has(index, one.episode_id)), at = rows.findIndex((one) => one.episode_id === id);
  const open = (row) => () => { if (row) location.hash = episodeAddress(index, row.episode_id); };
  return { n: open(rows[at + 1]), p: open(rows[at - 1]) };
}

async function view(now) {
  if (now.view === "compare" && payload.pair) return { node: compareView(payload.pair) };
  if (now.view === "sweep" && payload.sweep) return { node: sweepView(payload.sweep) };
  if (now.view === "runs") return { node: runsView(payload.runs) };
  if (now.view === "diff") return diffOf(now);
  if (now.view === "branches" && payload.runs[now.index]) await source.load(now.index);
  if (now.view === "branches") return { node: branchTree(payload.runs) || el("p", null, "No episode is a branch.") };
  if (!payload.runs.length) return { node: el("p", null, "No runs yet.") };
  if (!payload.runs[now.index]) return { node: el("p", null, "This run does not exist.") };
  const run = await source.load(now.index);
  if (now.view === "episode") return episodeOf(now, run);
  if (now.view === "episodes") return { node: el("div", null, el("h2", null, "Episodes"), episodesTable(now.index, run, now.q)) };
  if (now.view === "tasks") return { node: el("div", null, el("h2", null, "Tasks"), tasksTable(now.index, run)) };
  if (now.view === "charts") return { node: chartsView(now.index, run) };
  if (now.view === "timeline") return { node: el("div", null, runTimeline(run, now.index) || el("p", null, "No times are recorded."), legend()) };
  if (now.view === "config") return { node: configView(now.index, run) };
  if (now.view === "search") return searchView(now.index, run, now.q);
  return { node: overview(now.index, run) };
}

async function episodeOf(now, run) {
  const row = run.episodes.find((one) => one.episode_id === now.id), keys = neighbours(now.index, run, now.id);
  const episode = row && row.has_steps ? await source.episode(now.index, now.id) : null;
  if (episode) {
    const made = episodeView(now.index, run, row, episode, now.step);
    return { ...made, keys: { ...keys, ...made.keys } };
  }
  const left = (run.left_out || []).find((one) => one.id === now.id);
  return { keys, node: el("div", null, el("h2", null, row ? row.task_name : now.id), row ? el("p", null, badge(row, run.results.statistics.threshold), ` attempt ${row.attempt}, reward ${row.reward ?? none}`) : null,
    row && row.error ? el("div", { class: "problem" }, block(`${row.error.type}: ${row.error.message}`)) : null,
    left ? [el("p", null, `The steps of this episode are not in this file: ${left.why}. Use this command to read them:`), el("code", null, left.command)] : el("p", null, row ? "The steps of this episode were not recorded." : "This episode does not exist.")) };
}

async function diffOf(now) {
  const sides = [];
  for (const [index, id] of [now.a, now.b]) {
    if (!payload.runs[index]) return { node: el("p", null, "This run does not exist.") };
    await source.load(index);
    const episode = source.has(index, id) ? await source.episode(index, id) : null;
    if (!episode) return { node: el("p", null, `The steps of ${id} are not in this file.`) };
    sides.push({ index, episode });
  }
  return { node: sideBySide(...sides) };
}

async function draw(options = {}) {
  const turn = ++drawing, folds = options.isRefresh ? openFolds() : null, slides = [...main.querySelectorAll(".scroll")].map((one) => one.scrollLeft), now = route(), scroll = window.scrollY, focus = document.activeElement, kept = options.isRefresh && current.search && focus === current.search ? [focus.value, focus.selectionStart] : null;
  let made;
  try { made = await view(now); } catch (error) { made = { node: el("p", { class: "problem" }, String(error && error.message || error)) }; }
  if (turn !== drawing) return;
  tabs(now);
  current = { keys: {}, ...made };
  replace(main, made.node);
  document.title = oneLine(["ares-exp", payload.runs[now.index] && payload.runs[now.index].name, now.view === "episode" ? now.id : now.view].filter((one) => one).join(" · "), 200);
  if (options.isRefresh) {
    for (const fold of main.querySelectorAll("details")) if (folds.has(foldName(fold))) fold.open = folds.get(foldName(fold));
    main.querySelectorAll(".scroll").forEach((one, at) => { one.scrollLeft = slides[at] || 0; });
    window.scrollTo(0, scroll);
    if (kept && current.search) { current.search.value = kept[0]; current.search.focus(); current.search.setSelectionRange(kept[1], kept[1]); }
  } else {
    window.scrollTo(0, 0);
    if (made.settled) made.settled();
  }
  document.documentElement.dataset.drawn = String(Number(document.documentElement.dataset.drawn || 0) + 1);
}

function foldName(fold) {
  const step = fold.closest("[data-step]");
  return `${step ? step.dataset.step : ""} ${fold.firstElementChild.textContent}`;
}

function openFolds() {
  return new Map([...main.querySelectorAll("details")].map((fold) => [foldName(fold), fold.open]));
}

function toggleTheme() {
  const root = document.documentElement, isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  try { localStorage.setItem("ares-exp-theme", root.dataset.theme); } catch { /* storage is not available to a local file */ }
}

const VIEWS = { o: "overview", e: "episodes", t: "tasks", c: "charts", l: "timeline", s: "search" };

document.addEventListener("keydown", (event) => {
  const isTyping = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  if (event.key === "Escape" && isTyping) { event.target.blur(); return; }
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const now = route(), act = (event.key in current.keys && current.keys[event.key]) || (Object.hasOwn(VIEWS, event.key) && payload.runs[now.index] && (() => { location.hash = runAddress(now.index, VIEWS[event.key]); }));
  if (event.key === "?") help.showModal();
  else if (event.key === "d") toggleTheme();
  else if (event.key === "/") { const input = current.search || main.querySelector("input.filter"); if (input) { event.preventDefault(); input.focus(); input.select(); } }
  else if (act) { event.preventDefault(); act(); }
});

// Requests a running run every two seconds, and redraws the open view if its data has changed.
async function poll() {
  if (!document.hidden) {
    const now = route();
    try {
      const before = JSON.stringify([...source.tags]);
      if (!payload.runs[now.index]) {
        const { isNew, data } = await source.list();
        if (isNew) payload.runs = data.runs.map((one) => ({ ...payload.runs.find((old) => old.key === one.key), ...one }));
      } else {
        await source.load(now.index);
        if (now.view === "episode") await source.episode(now.index, now.id).catch(() => null);
      }
      if (JSON.stringify([...source.tags]) !== before && !["search", "diff"].includes(now.view)) await refresh(now);
      document.body.classList.remove("stale");
    } catch { document.body.classList.add("stale"); }
  }
  setTimeout(poll, POLL_MS);
}

async function refresh(now) {
  const isTyping = main.contains(document.activeElement) && document.activeElement.tagName === "INPUT" && document.activeElement !== current.search;
  if (isTyping) return;
  if (now.view === "episode" && current.step) remember(episodeAddress(now.index, now.id, now.step === null ? null : current.step()));
  await draw({ isRefresh: true });
}

function start() {
  try { const theme = localStorage.getItem("ares-exp-theme"); if (theme) document.documentElement.dataset.theme = theme === "dark" ? "dark" : "light"; } catch { /* storage is not available to a local file */ }
  put(help, [el("h2", null, "Keys"), el("dl", { class: "facts" }, HELP.map(([key, words]) => el("div", null, el("dt", null, key), el("dd", null, words)))), el("form", { method: "dialog" }, el("button", null, "close"))]);
  replace(page, bar, main, el("footer", null, `ares_exp ${payload.ares_exp} · ${payload.live ? "live" : "created " + moment(payload.made)}${payload.redacted && payload.redacted.length ? " · redacted: " + payload.redacted.join(", ") : ""}`), help);
  window.addEventListener("hashchange", () => draw());
  PHONE.addEventListener("change", () => draw({ isRefresh: true }));
  draw().then(() => { if (source.isLive) poll(); });
}

start();
