// Tables that users can filter, sort and save.

const ROWS_SHOWN = 200;
const CONDITION = /^([\w.]+)(<=|>=|!=|[:=<>])(.*)$/;

// Returns a filter of rows. A row must contain all words and meet all conditions, such as reward<1 or outcome:error.
function matcher(query, columns) {
  const tests = (query.match(/(?:[^\s"]|"[^"]*"?)+/g) || []).map((term) => {
    const found = CONDITION.exec(term);
    const column = found && columns.find((one) => one.key === found[1]);
    if (!column) {
      const word = term.replaceAll('"', "").toLowerCase();
      return (row) => columns.some((one) => String(one.get(row) ?? "").toLowerCase().includes(word));
    }
    const [, , sign, quoted] = found, wanted = quoted.replaceAll('"', "");
    return (row) => holds(column.get(row), sign, wanted);
  });
  return (row) => tests.every((test) => test(row));
}

function holds(value, sign, wanted) {
  const missing = value === null || value === undefined;
  if (sign === ":") return String(missing ? "" : value).toLowerCase().includes(wanted.toLowerCase());
  const [a, b] = [Number(value), Number(wanted)];
  const isNumber = !missing && value !== "" && wanted !== "" && !isNaN(a) && !isNaN(b);
  const same = isNumber ? a === b : String(missing ? "" : value) === wanted;
  if (sign === "=") return same;
  if (sign === "!=") return !same;
  if (!isNumber) return false;
  return sign === "<" ? a < b : sign === ">" ? a > b : sign === "<=" ? a <= b : a >= b;
}

function compareValues(a, b) {
  const missing = (one) => one === null || one === undefined || one === "";
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

// Formats a CSV cell. A quote prevents a spreadsheet from executing an untrusted name as a formula.
function csvCell(value) {
  if (value === null || value === undefined) return "";
  let text = typeof value === "object" ? JSON.stringify(value) : String(value);
  if (typeof value !== "number" && /^[=+\-@\t\r]/.test(text)) text = "'" + text;
  return /[",\n\r]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
}

// Creates a table. Columns have `key`, `name`, `get` (the value to sort, filter and save) and optionally `show` (a
// node). A column with `isHidden` is used only in filters and saved files.
function table(name, columns, rows, options = {}) {
  const state = options.state || {};
  state.sort ??= options.sort || null;
  state.query ??= "";
  state.shown ??= ROWS_SHOWN;
  const body = el("tbody"), head = el("tr"), told = el("span", { class: "told", role: "status" });
  const more = el("button", { type: "button", class: "more", onclick: () => { state.shown += ROWS_SHOWN; draw(); } });
  const filter = el("input", { type: "search", class: "filter", value: state.query, "aria-label": `filter ${name}`,
    placeholder: `filter, e.g. ${options.example || "word outcome:error"}`,
    oninput: () => { state.query = filter.value; state.shown = ROWS_SHOWN; draw(); } });
  const shown_ = columns.filter((one) => !one.isHidden);
  let chosen = [];
  function draw() {
    chosen = rows.filter(matcher(state.query, columns));
    if (state.sort) {
      const column = columns.find((one) => one.key === state.sort.key);
      if (column) chosen.sort((a, b) => compareValues(column.get(a), column.get(b)) * (state.sort.down ? -1 : 1));
    }
    replace(told, chosen.length === rows.length ? count(rows.length, options.thing || "row")
      : `${number(chosen.length)} of ${count(rows.length, options.thing || "row")}`);
    replace(head, shown_.map(heading));
    replace(body, chosen.length ? chosen.slice(0, state.shown).map(line) : rows.length ? el("tr", null, el("td", { class: "dim", colspan: shown_.length }, `No ${options.thing || "row"} matches this filter.`)) : null);
    replace(more, `show ${number(Math.min(ROWS_SHOWN, chosen.length - state.shown))} more`);
    more.hidden = chosen.length <= state.shown;
    if (options.onchange) options.onchange(state, chosen);
  }
  function heading(column) {
    const is = state.sort && state.sort.key === column.key;
    const sort = () => { state.sort = { key: column.key, down: is ? !state.sort.down : column.isNumber || false }; draw(); };
    return el("th", { class: column.isNumber ? "number" : null, "aria-sort": is ? (state.sort.down ? "descending" : "ascending") : "none" },
      el("button", { type: "button", onclick: sort, title: column.about || `sort by ${column.name}` },
        column.name, is ? (state.sort.down ? " ▾" : " ▴") : null));
  }
  function line(row) {
    return el("tr", { class: options.rowClass ? options.rowClass(row) : null },
      shown_.map((column) => el("td", { class: column.isNumber ? "number" : null },
        column.show ? column.show(row) : column.isNumber ? number(column.get(row)) : oneLine(column.get(row) ?? none, 200))));
  }
  const plain = () => chosen.map((row) => Object.fromEntries(columns.map((one) => [one.key, one.get(row) ?? null])));
  const asCsv = () => [columns.map((one) => csvCell(one.key)).join(","),
    ...chosen.map((row) => columns.map((one) => csvCell(one.get(row))).join(","))].join("\r\n") + "\r\n";
  draw();
  return el("section", { class: "table", "data-table": name },
    el("div", { class: "tools" }, filter, told,
      el("button", { type: "button", onclick: () => save(name + ".csv", asCsv(), "text/csv") }, "CSV"),
      el("button", { type: "button", onclick: () => save(name + ".json", JSON.stringify(plain(), null, 1), "application/json") }, "JSON")),
    el("div", { class: "scroll" }, el("table", null, el("thead", null, head), body)), more);
}
