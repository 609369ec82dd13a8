"use strict";
// Creation of DOM nodes. Every string from an agent, a task or a file becomes a text node and is never parsed as HTML.
// Control characters, text directions, unpaired surrogates and other invisible characters are shown as escapes.

const SVG_SPACE = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "rect", "line", "circle", "path", "text", "title", "polyline", "polygon"]);
const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;
const COLOURS_OR_HIDDEN = /\x1b\[([0-9;]{0,32})m|[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;
const HARMLESS = new Set(["\n", "\t", "\u200c", "\u200d"]);
const MOST_SPANS = 2000;

function spelled(char) {
  const code = char.codePointAt(0);
  if (char === "\r") return "\\r";
  if (code < 0x100) return "\\x" + code.toString(16).padStart(2, "0");
  return code < 0x10000 ? "\\u" + code.toString(16).padStart(4, "0") : "\\U" + code.toString(16).padStart(8, "0");
}

function shown(text) {
  return String(text).replace(HIDDEN, (char) => (HARMLESS.has(char) ? char : spelled(char)));
}

function oneLine(text, limit = 120) {
  const flat = String(text).slice(0, 4 * limit).replace(/\s+/g, " ").trim();
  return flat.length <= limit ? flat : flat.slice(0, limit - 1) + "…";
}

// Creates an element. Attributes can be `class`, handlers (`onclick`), `style` as an object, and `href` within the page.
function el(tag, attributes, ...children) {
  const node = SVG_TAGS.has(tag) ? document.createElementNS(SVG_SPACE, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name === "href" && !String(value).startsWith("#")) throw new Error("a link must stay within the page");
    else if (name === "value" || name === "checked" || name === "disabled") node[name] = value;
    else node.setAttribute(name, value === true ? "" : shown(value));
  }
  put(node, children);
  return node;
}

function put(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    node.append(child instanceof Node ? child : document.createTextNode(shown(child)));
  }
  return node;
}

function replace(node, ...children) {
  node.replaceChildren();
  return put(node, children);
}

// Returns text with terminal colours as CSS classes. Other control characters are shown as escapes.
function coloured(text) {
  const parts = document.createDocumentFragment();
  let at = 0, classes = [], spans = 0;
  const add = (piece, extra) => {
    if (!piece) return;
    const all = extra ? [...classes, extra] : classes;
    if (!all.length || ++spans > MOST_SPANS) parts.append(document.createTextNode(piece));
    else parts.append(el("span", { class: all.join(" ") }, piece));
  };
  for (const found of text.matchAll(COLOURS_OR_HIDDEN)) {
    if (HARMLESS.has(found[0])) continue;
    add(text.slice(at, found.index));
    at = found.index + found[0].length;
    if (found[1] === undefined) add(spelled(found[0]), "spelled");
    else classes = colourClasses(classes, found[1]);
  }
  add(text.slice(at));
  return parts;
}

function colourClasses(before, codes) {
  let classes = before;
  for (const code of codes.split(";").map(Number)) {
    if (code === 0) classes = [];
    else if (code === 1) classes = [...classes.filter((name) => name !== "bold"), "bold"];
    else if ((code >= 30 && code <= 37) || (code >= 90 && code <= 97))
      classes = [...classes.filter((name) => !name.startsWith("ansi")), "ansi" + (code % 10)];
    else if (code === 39) classes = classes.filter((name) => !name.startsWith("ansi"));
  }
  return classes;
}

const HEAD_LINES = 30, TAIL_LINES = 12, HEAD_CHARS = 6000, TAIL_CHARS = 2000, PIECE_CHARS = 200000;

// Returns a block of text. A long text is shown as its head and tail, and a button shows the middle.
function block(text, kind) {
  text = String(text);
  const lines = text.split("\n");
  const isLong = lines.length > HEAD_LINES + TAIL_LINES + 5 || text.length > HEAD_CHARS + TAIL_CHARS + 500;
  if (!isLong) return el("pre", { class: kind }, coloured(text));
  let head = lines.slice(0, HEAD_LINES).join("\n").slice(0, HEAD_CHARS);
  const tail = lines.slice(-TAIL_LINES).join("\n").slice(-TAIL_CHARS);
  const middle = text.slice(head.length, text.length - tail.length);
  const rest = el("span", { class: "rest" });
  const button = el("button", { class: "more", type: "button", onclick: more });
  let at = 0;
  function label() {
    const left = middle.slice(at);
    replace(button, `show ${number(Math.min(left.length, PIECE_CHARS))} of ${number(left.length)} more characters`);
  }
  function more() {
    rest.append(coloured(middle.slice(at, at + PIECE_CHARS)));
    at += PIECE_CHARS;
    if (at >= middle.length) button.remove();
    else label();
  }
  label();
  return el("pre", { class: kind }, coloured(head), rest, button, coloured(tail));
}

function fold(title, content, isOpen) {
  const details = el("details", { class: "fold" }, el("summary", null, title));
  const fill = () => { if (details.open && details.children.length === 1) put(details, [content()]); };
  details.addEventListener("toggle", fill);
  if (isOpen) { details.open = true; fill(); }
  return details;
}

// Sets the address in the browser's address bar without scrolling. An embedded page has no address bar.
function remember(address) {
  try { history.replaceState(null, "", address); } catch { /* an embedded page */ }
}

function save(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
