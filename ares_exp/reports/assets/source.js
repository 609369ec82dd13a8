// Sources of the data: blocks in this file, or a server on this machine that reads the run's files.

async function unpacked(text) {
  const raw = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

class Embedded {
  constructor(payload) {
    this.payload = payload;
    this.isLive = false;
    this.opened = new Map();
  }
  run(index) { return this.payload.runs[index]; }
  async load(index) { return this.run(index); }
  has(index, id) { return Object.hasOwn(this.run(index).blocks || {}, id); }
  async episode(index, id) {
    const key = this.has(index, id) ? this.run(index).blocks[id] : null;
    if (!key) return null;
    if (!this.opened.has(key)) {
      if (this.opened.size > 20) this.opened.delete(this.opened.keys().next().value);
      this.opened.set(key, await unpacked(document.getElementById(key).textContent));
    }
    return this.opened.get(key);
  }
}

class Live {
  constructor(payload) {
    this.payload = payload;
    this.isLive = true;
    this.tags = new Map();
    this.found = new Map();
  }
  run(index) { return this.payload.runs[index]; }
  has(index, id) { const row = this.run(index).episodes.find((one) => one.episode_id === id); return !!row && row.has_steps; }
  async ask(path) {
    const known = this.tags.get(path);
    const response = await fetch(path, { headers: known ? { "If-None-Match": known } : {}, cache: "no-store" });
    if (response.status === 304) return { isNew: false, data: this.found.get(path) };
    if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
    this.tags.set(path, response.headers.get("ETag"));
    if (this.found.size > 20) { const first = this.found.keys().next().value; this.found.delete(first); this.tags.delete(first); }
    this.found.set(path, await response.json());
    return { isNew: true, data: this.found.get(path) };
  }
  async load(index) {
    const key = encodeURIComponent(this.run(index).key);
    const { isNew, data } = await this.ask("api/run?run=" + key);
    if (isNew) Object.assign(this.run(index), data);
    return this.run(index);
  }
  async episode(index, id) {
    const key = encodeURIComponent(this.run(index).key);
    return (await this.ask(`api/episode?run=${key}&id=${encodeURIComponent(id)}`)).data;
  }
  async list() { return this.ask("api/runs"); }
}
