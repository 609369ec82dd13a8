// The view of one episode: a window of its steps, next to the verifier's output and the changed files. Also the view of
// two episodes side by side, aligned at their first difference.

const WINDOW = 50;
const KINDS = { request: "requests", reply: "replies", reasoning: "reasoning", command: "commands", file: "changed files" };
const hiddenKinds = new Set();

function ended(command) {
  return command.timed_out ? "timed out" : command.exit_code === null ? "killed" : `exit ${command.exit_code}`;
}

function stepNode(episode, position, address) {
  const step = episode.steps[position], changes = episode.changes[String(step.index)];
  const told = [step.type, ...["reward", "discount"].filter((name) => step[name] !== undefined && (name === "reward" || step.type === "LAST")).map((name) => `${name} ${number(step[name])}`),
    ...["policy", "environment", "container"].filter((name) => step[name + "_sec"] !== undefined).map((name) => `${name} ${seconds(step[name + "_sec"])}`)];
  return el("article", { class: "step", id: `step-${position}`, "data-step": position },
    el("h3", null, el("a", { href: address ? address(position) : null }, `step ${step.index}`), step.conversation ? el("span", { class: "conversation", title: "conversation of a sub-agent" }, step.conversation) : null,
      el("span", { class: "dim" }, ` ${step.at < 0 ? `${seconds(-step.at)} before the episode` : seconds(step.at)} · ${told.join(" · ")}`)),
    step.reply ? replyNodes(step.reply) : null,
    (step.commands || []).map(commandNode), (step.background_requests || []).map(backgroundNode),
    changes ? changeNodes(changes) : null,
    requestNodes(episode, step),
    step.observation !== undefined ? el("div", { class: "kind request" }, el("h4", null, "observation"), block(step.observation)) : null);
}

function replyNodes(reply) {
  const usage = reply.usage || {}, told = [reply.finish_reason, usage.prompt_tokens || usage.generated_tokens ? `${number(usage.prompt_tokens)} + ${number(usage.generated_tokens)} tokens` : null,
    usage.reasoning_tokens ? `${number(usage.reasoning_tokens)} of reasoning` : null, reply.cost ? dollars(reply.cost) : null, reply.model].filter((one) => one);
  return [el("h4", { class: "kind reply" }, "reply ", el("span", { class: "dim" }, told.join(" · "))), reply.pieces.map((piece) => {
    if (piece.kind === "reasoning") return el("div", { class: "kind reasoning" }, fold(`reasoning, ${number(piece.text.length)} characters`, () => block(piece.text, "reasoning"), piece.text.length < 600));
    if (piece.kind === "call") return el("div", { class: "kind reply" }, el("h5", null, "calls ", el("b", null, piece.name)), block(unwrapped(piece.text), "call"));
    return el("div", { class: "kind reply" }, block(piece.text, "said"));
  })];
}

// Formats the arguments of a tool call on several lines if they are JSON.
function unwrapped(text) {
  try { const value = JSON.parse(text); return typeof value === "object" && value !== null ? JSON.stringify(value, null, 2) : text; } catch { return text; }
}

function commandNode(command) {
  const isWell = command.exit_code === 0;
  return el("div", { class: "kind command" + (isWell ? "" : " bad") }, block("$ " + command.command, "command"),
    el("span", { class: isWell ? "exit" : "exit bad" }, ended(command)), el("span", { class: "dim" }, " " + seconds(command.duration_sec)));
}

// A background request of the agent, which the policy answered without a step.
function backgroundNode(asked) {
  return el("div", { class: "kind reply" }, fold(`background request ${asked.conversation}: ${oneLine(asked.asked, 100)}`, () => el("div", null, block(asked.asked), replyNodes(asked.reply))));
}

function changeNodes(changes) {
  if (changes.problem) return el("p", { class: "kind file problem" }, changes.problem);
  const title = `${count(changes.paths.length + changes.more, "path")} changed since ${changes.since === null ? "the start" : "step " + changes.since}`;
  if (!changes.paths.length) return el("p", { class: "kind file dim" }, title);
  return el("div", { class: "kind file" }, fold(title, () => el("div", null, changes.paths.map((one) => el("div", { class: "change" },
    el("b", { class: one.change }, one.change), ` ${one.path}`, one.target ? ` → ${one.target}` : null, el("span", { class: "dim" }, one.kind === "file" ? ` ${bytes(one.size)}` : ` ${one.kind}`),
    one.diff ? diffBlock(one.diff) : null)), changes.more ? el("p", { class: "dim" }, `and ${number(changes.more)} more`) : null), changes.since !== null && changes.paths.length < 8));
}

function diffBlock(text) {
  return el("pre", { class: "diff" }, text.split("\n").map((line) => el("span", { class: { "+": "plus", "-": "minus", "@": "at" }[line[0]] }, coloured(line), "\n")));
}

function requestNodes(episode, step) {
  const nodes = [];
  if (step.settings) nodes.push(fold(`settings: ${step.settings.map(([name]) => name).join(", ")}`, () => el("div", null, step.settings.map(([name, before, now]) =>
    el("div", null, el("h5", null, name), before === null ? null : [el("span", { class: "dim" }, "was"), block(before)], now === null ? el("p", { class: "dim" }, "no longer set") : block(now))))));
  if (step.base !== undefined) nodes.push(el("p", { class: "dim" }, `continues the conversation of step ${step.base}`));
  for (const [sign, number_] of step.edits || []) {
    const message = episode.messages[number_];
    if (sign === "-") nodes.push(el("div", { class: "removed" }, fold(`removed: ${message.role}, ${number(message.text.length)} characters`, () => block(message.text))));
    else if (sign === "+") nodes.push(el("div", { class: "message role-" + (["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "other") },
      el("h5", null, message.role, el("span", { class: "dim" }, ` ${number(message.text.length)} characters`)), block(message.text)));
  }
  return nodes.length ? el("div", { class: "kind request" }, nodes) : null;
}

// A strip with one cell per step, coloured by the exit codes of its commands.
function strip(episode, at, onstep) {
  const wide = Math.max(2, Math.min(14, Math.floor(900 / Math.max(episode.steps.length, 1))));
  return el("div", { class: "strip", role: "navigation", "aria-label": "steps" }, episode.steps.map((step, position) => {
    const commands = step.commands || [], name = position === at ? "here" : commands.some((one) => one.exit_code !== 0) ? "failed" : commands.length ? "passed" : "cut";
    return el("button", { type: "button", class: "cell " + name, style: { width: wide + "px" }, tabindex: -1, title: `step ${step.index}: ${commands.map((one) => `${ended(one)} ${oneLine(one.command, 60)}`).join("; ") || step.type}`,
      onclick: () => onstep(position) });
  }));
}

function episodeView(index, run, row, episode, position) {
  const threshold = run.results.statistics.threshold, address = (step) => episodeAddress(index, episode.id, step);
  let at = Math.max(0, Math.min(position ?? 0, episode.steps.length - 1));
  let from = Math.max(0, Math.min(at - Math.floor(WINDOW / 2), episode.steps.length - WINDOW));
  const list = el("div", { class: "steps" }), stripPlace = el("div"), found = el("span", { class: "told", role: "status" });
  const input = el("input", { type: "search", class: "filter find", placeholder: "find in this episode", "aria-label": "find in this episode",
    onkeydown: (event) => { if (event.key === "Enter") find(event.shiftKey ? -1 : 1); } });
  function draw() {
    const to = Math.min(from + WINDOW, episode.steps.length);
    const button = (text, move) => el("button", { type: "button", class: "more", onclick: () => { from = move; draw(); } }, text);
    replace(list, from > 0 ? button(`steps ${Math.max(0, from - WINDOW)} to ${from - 1}`, Math.max(0, from - WINDOW)) : null,
      episode.steps.slice(from, to).map((_, n) => stepNode(episode, from + n, address)),
      to < episode.steps.length ? button(`steps ${to} to ${Math.min(to + WINDOW, episode.steps.length) - 1}`, to) : null,
      to === episode.steps.length && episode.unfinished ? el("article", { class: "step problem" }, el("h3", null, `step ${episode.unfinished.index}, not finished`),
        episode.unfinished.reply ? replyNodes(episode.unfinished.reply) : null, (episode.unfinished.commands || []).map(commandNode)) : null);
    mark();
  }
  function mark() {
    replace(stripPlace, strip(episode, at, (step) => show(step)));
    list.querySelectorAll(".step.here").forEach((one) => one.classList.remove("here"));
    const here = list.querySelector(`#step-${at}`);
    if (here) here.classList.add("here");
    return here;
  }
  function show(step) {
    at = Math.max(0, Math.min(step, episode.steps.length - 1));
    if (at < from || at >= from + WINDOW) { from = Math.max(0, Math.min(at - 5, episode.steps.length - WINDOW)); draw(); }
    const here = mark();
    if (here) here.scrollIntoView({ block: "start" });
    remember(address(at));
  }
  function find(way) {
    const word = input.value.toLowerCase();
    if (!word) return;
    const hits = episode.steps.map((step, n) => (stepText(episode, step).toLowerCase().includes(word) ? n : -1)).filter((n) => n >= 0);
    replace(found, hits.length ? `in ${count(hits.length, "step")}` : "not found");
    if (hits.length) show(way > 0 ? hits.find((n) => n > at) ?? hits[0] : [...hits].reverse().find((n) => n < at) ?? hits[hits.length - 1]);
  }
  draw();
  const siblings = run.episodes.filter((one) => one.task_name === episode.task && one.episode_id !== episode.id && source.has(index, one.episode_id));
  const compareTo = siblings.length ? el("select", { "aria-label": "compare with", onchange: (event) => { if (event.target.value) location.hash = `#/diff/${runName(index)}/${encodeURIComponent(episode.id)}/${runName(index)}/${encodeURIComponent(event.target.value)}`; } },
    el("option", { value: "" }, "side by side with …"), siblings.slice(0, 200).map((one) => el("option", { value: one.episode_id }, `attempt ${one.attempt}: ${one.outcome}, reward ${one.reward ?? none}`))) : null;
  const facts = [["reward", score(episode.reward)], ...Object.entries(episode.rewards || {}).filter(([name]) => name !== "reward").map(([name, value]) => [name, score(value)]),
    ["steps", number(Math.max(episode.steps.length - 1, 0))], ["seconds", seconds(episode.seconds)],
    ...(row ? [["attempt", row.attempt], ["tokens", number((row.prompt_tokens || 0) + (row.generated_tokens || 0) || null)], ["cost", row.cost ? dollars(row.cost) : null]] : []), ["started", moment(episode.started)],
    ...Object.entries(episode.metadata).filter(([name]) => ["agent", "policy", "model", "seed", "container_image"].includes(name))];
  const aside = asideOf(episode, row);
  const node = el("div", { class: "episode" },
    el("header", null, el("h2", null, episode.task, " ", badge({ outcome: episode.outcome || "running", reward: episode.reward }, threshold)), el("p", { class: "dim id" }, episode.id),
      factList(facts), episode.error ? el("div", { class: "problem" }, block(`${episode.error.type}: ${episode.error.message}`)) : null, row && row.note ? el("p", { class: "problem" }, row.note) : null),
    el("div", { class: "tools" }, Object.entries(KINDS).map(([kind, words]) => el("label", null, el("input", { type: "checkbox", checked: !hiddenKinds.has(kind), onchange: (event) => { hiddenKinds[event.target.checked ? "delete" : "add"](kind); node.className = classOf(); } }), " ", words)), input, found, compareTo),
    stripPlace, fold("time by phase", () => episodeTimeline(episode, row, show) || el("p", null, "No times are recorded."), true),
    el("div", { class: "beside" }, list, aside));
  const classOf = () => ["episode", ...[...hiddenKinds].map((kind) => "no-" + kind)].join(" ");
  node.className = classOf();
  return { node, keys: { j: () => show(at + 1), k: () => show(at - 1) }, search: input, settled: () => { if (position !== null && position !== undefined) show(at); }, step: () => at };
}

function stepText(episode, step) {
  return [...(step.reply ? step.reply.pieces.map((one) => `${one.name || ""} ${one.text}`) : []), ...(step.commands || []).map((one) => one.command),
    ...(step.background_requests || []).map((one) => [one.asked, ...one.reply.pieces.map((piece) => piece.text)].join("\n")), ...(step.edits || []).map(([sign, n]) => (sign === "=" ? "" : episode.messages[n].text)), step.observation || ""].join("\n");
}

function factList(facts) {
  return el("dl", { class: "facts" }, facts.filter(([, value]) => value !== null && value !== undefined && value !== none).map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))));
}

function asideOf(episode, row) {
  const shownFiles = episode.files.filter((one) => one.text !== undefined), others = episode.files.filter((one) => one.text === undefined);
  const nodes = shownFiles.map((one, n) => fold(`${one.name} (${bytes(one.size)})`, () => block(one.text || "(empty)"), n < 3 && one.name.startsWith("verifier/")));
  if (others.length) nodes.push(fold(`${count(others.length, "more file")}`, () => el("ul", null, others.map((one) => el("li", null, `${one.name} (${bytes(one.size)})`)))));
  if (row && row.stages && row.stages.length) nodes.push(fold("stages", () => el("ul", null, row.stages.map((one) => el("li", null, `${one.name}: reward ${one.reward ?? none}, ${count(one.num_steps, "step")}`))), true));
  const more = Object.entries(episode.metadata);
  if (more.length) nodes.push(fold("metadata", () => el("dl", { class: "facts long" }, more.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, oneLine(value, 500)))))));
  return el("aside", null, el("h3", null, shownFiles.length ? "Verifier output" : "More"), nodes.length ? nodes : el("p", { class: "dim" }, "The verifier left no files."), el("p", { class: "dim" }, episode.path));
}

// Finds the first step in which two episodes differ, and describes the difference.
function parting(a, b) {
  const names = ["the replies differ", "the commands or their exit codes differ", "the outcomes differ", "the requests differ"];
  for (let n = 0; n < Math.max(a.marks.length, b.marks.length); n++) {
    if (n >= a.marks.length || n >= b.marks.length) return { step: n, what: "only one episode continues" };
    const which = a.marks[n].findIndex((mark, at) => mark !== b.marks[n][at]);
    if (which >= 0) return { step: n, what: names[which] };
  }
  return null;
}

function sideBySide(left, right) {
  const apart = parting(left.episode, right.episode), from = apart ? apart.step : Math.max(left.episode.steps.length, right.episode.steps.length);
  const longest = Math.max(left.episode.steps.length, right.episode.steps.length), body = el("div", { class: "pair" });
  let to = Math.min(longest, from + 6), start = Math.max(0, from - 1);
  const side = (one, n) => el("div", null, n < one.episode.steps.length ? stepNode(one.episode, n, (step) => episodeAddress(one.index, one.episode.id, step)) : el("p", { class: "dim" }, "ended"));
  function draw() {
    replace(body, start > 0 ? el("button", { type: "button", class: "more", onclick: () => { start = Math.max(0, start - WINDOW); draw(); } }, `${count(start, "step")} in common before`) : null,
      Array.from({ length: to - start }, (_, n) => el("div", { class: "row" + (apart && start + n === apart.step ? " parting" : "") }, side(left, start + n), side(right, start + n))),
      to < longest ? el("button", { type: "button", class: "more", onclick: () => { to = Math.min(longest, to + WINDOW); draw(); } }, `${count(longest - to, "more step")}`) : null);
  }
  draw();
  const head = (name, one) => el("div", null, el("h3", null, `${name}: `, el("a", { href: episodeAddress(one.index, one.episode.id) }, one.episode.id)),
    factList([["task", one.episode.task], ["outcome", one.episode.outcome || "running"], ["reward", score(one.episode.reward)], ["steps", number(one.episode.steps.length - 1)], ["seconds", seconds(one.episode.seconds)]]));
  return el("div", null, el("h2", null, "Two attempts"), el("p", { class: "verdict" }, apart ? `${count(apart.step, "time step")} in common, then ${apart.what}.` : "The episodes are equal."),
    el("div", { class: "pair" }, el("div", { class: "row" }, head("A", left), head("B", right))), body);
}
