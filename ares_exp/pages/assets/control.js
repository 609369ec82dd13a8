// The state of a run under way, as it told it last, and buttons that give it orders where the server takes them.

const WAITS = { start: "to start", policy: "for the policy", environment: "for the environment", end: "to be released" };
const MOST_LIVE = 50;

function liveBox(index, run) {
  const status = run.status;
  if (!status) return null;
  const held = status.held, waits = Object.entries(status.waiting).map(([what, many]) => `${WAITS[what] || what}: ${number(many)}`).join(", ");
  const answer = el("p", { class: "dim", "data-answer": true, role: "status" }, run.said || "");
  return el("section", { class: "live", "data-live": status.state }, el("h3", null, "Now"),
    el("p", null, `${status.state}: ${count(status.episodes.length, "episode")} of at most ${number(status.concurrency)} under way, ${number(status.queued)} queued`, waits ? `; waiting ${waits}` : "", el("span", { class: "dim" }, ` · told at ${moment(status.written_at)}`)),
    held ? el("p", { class: "problem" }, `paused by ${held.by}${held.now ? ", the policy is not asked" : ""}${held.until ? `, until ${moment(held.until)}` : ""}${held.reason ? `: ${held.reason}` : ""}`) : null,
    payload.control ? orderButtons(index, run, answer) : null, payload.control ? answer : null,
    status.episodes.length ? fold(`${count(status.episodes.length, "episode")} under way`, () => el("ul", null, status.episodes.slice(0, MOST_LIVE).map((one) => el("li", null, liveEpisode(index, run, one, status, answer)))), payload.control) : null);
}

function liveEpisode(index, run, one, status, answer) {
  const give = (words, order, question) => orderButton(index, run, answer, words, { ...order, what: one.episode_id }, question);
  return [el("a", { href: episodeAddress(index, one.episode_id) }, oneLine(one.task_name, 80)), el("span", { class: "dim" }, ` attempt ${one.attempt}, step ${number(one.num_steps)}, waits ${WAITS[one.waits_for] || one.waits_for} for ${seconds(Math.max(status.written_at - one.since, 0))} `),
    payload.control ? [give("cancel", { verb: "cancel" }, `Cancel ${one.episode_id}?`), " ", give("end and score", { verb: "cancel", verify: true }, `End ${one.episode_id} and score it?`), " ", give("snapshot", { verb: "snapshot" })] : null];
}

function orderButtons(index, run, answer) {
  const give = (words, order, question) => orderButton(index, run, answer, words, order, question);
  const many = el("input", { type: "number", min: "1", value: String(run.status.concurrency), "aria-label": "episodes at once", "data-many": true });
  return el("p", { class: "orders" }, run.status.held ? give("resume", { verb: "resume" }) : [give("pause", { verb: "pause" }), " ", give("pause now", { verb: "pause", now: true })], " ",
    many, " ", el("button", { type: "button", "data-order": "set", onclick: () => order(index, run, answer, { verb: "set", values: { concurrency: Number(many.value) } }) }, "at once"), " ",
    give("stop", { verb: "stop" }, "End the run? `resume=` goes on with it."));
}

function orderButton(index, run, answer, words, asked, question) {
  return el("button", { type: "button", "data-order": words, onclick: () => { if (!question || window.confirm(question)) order(index, run, answer, asked); } }, words);
}

async function order(index, run, answer, asked) {
  replace(answer, "…");
  try {
    const found = await source.order(index, asked);
    run.said = `${found.outcome}: ${found.says}`;
  } catch (error) { run.said = String((error && error.message) || error); }
  replace(answer, run.said);
}
