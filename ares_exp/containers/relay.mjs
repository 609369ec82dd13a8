// The relay in JavaScript, for Node 12 or newer. Its source is sent to a container, for `node --input-type=module -e`.
import net from "net";
import { writeSync } from "fs";

const [WINDOW, CHUNK, CONNECTIONS] = [262144, 32768, 64];
const [MORE, BROKEN, ACCEPTED] = [0x80000000, 0xfffffffe, 0xffffffff];
const connections = new Map();
let count = 0;
let heard = Buffer.alloc(0);
const [lease, ...ports] = process.argv.slice(1).map(Number);
let silence; // timer that ends the relay after `lease` seconds of silence; 0: no limit

function put(number, word, data) {
  const head = Buffer.alloc(8);
  head.writeUInt32BE(number, 0);
  head.writeUInt32BE(word, 4);
  process.stdout.write(data ? Buffer.concat([head, data]) : head);
}

// Closes a connection immediately. The program at its other end sees a reset, if this Node can send one.
function drop(one) {
  connections.delete(one.number);
  if (one.socket.resetAndDestroy) one.socket.resetAndDestroy();
  else one.socket.destroy();
}

// Closes a connection if both of its directions have ended.
function finish(one) {
  if (one.reads || one.writes) return;
  connections.delete(one.number);
  one.socket.destroy();
}

function accept(socket) {
  const one = { number: ++count, socket, credit: WINDOW, taken: 0, reads: true, writes: true };
  connections.set(one.number, one);
  socket.setNoDelay(true);
  put(one.number, ACCEPTED);
  socket.on("error", () => {
    if (!connections.has(one.number)) return;
    put(one.number, BROKEN);
    drop(one);
  });
  // Read explicitly, without the event "data", so that no more than the credit is taken from the connection.
  socket.on("readable", () => read(one));
  socket.on("end", () => {
    if (!connections.has(one.number)) return;
    one.reads = false;
    put(one.number, 0);
    finish(one);
  });
}

function read(one) {
  while (one.credit && one.socket.readableLength) {
    const data = one.socket.read(Math.min(CHUNK, one.credit, one.socket.readableLength));
    if (data === null) return;
    one.credit -= data.length;
    put(one.number, data.length, data);
  }
  if (one.credit) one.socket.read(0); // requests more data, and the end
}

function follow(one, word, data) {
  if (word === BROKEN) drop(one);
  else if (word >= MORE) {
    one.credit += word - MORE;
    read(one);
  } else if (word) {
    one.socket.write(data, (error) => {
      if (error) return;
      one.taken += data.length;
      if (one.taken >= WINDOW / 4 && connections.has(one.number)) {
        put(one.number, MORE + one.taken);
        one.taken = 0;
      }
    });
  } else {
    one.socket.end(() => {
      one.writes = false;
      finish(one);
    });
  }
}

// Ends the relay because its lease has expired. Sends an end frame first.
function lapse() {
  put(0, 0);
  process.exit();
}

function listen() {
  clearTimeout(silence);
  if (lease) silence = setTimeout(lapse, lease * 1000);
}

function hear(data) {
  listen();
  heard = heard.length ? Buffer.concat([heard, data]) : data;
  let at = 0;
  while (heard.length - at >= 8) {
    const [number, word] = [heard.readUInt32BE(at), heard.readUInt32BE(at + 4)];
    const end = at + 8 + (word <= CHUNK ? word : 0);
    if (heard.length < end) break;
    if (!number) process.exit();
    const one = connections.get(number);
    if (one) follow(one, word, Buffer.from(heard.subarray(at + 8, end)));
    at = end;
  }
  heard = heard.subarray(at);
}

function start(ports, said) {
  if (!ports.length) {
    writeSync(1, `${said}\n`);
    process.exit();
  }
  const server = net.createServer({ allowHalfOpen: true }, accept);
  server.maxConnections = CONNECTIONS; // further connections are closed immediately
  server.once("error", (error) => start(ports.slice(1), error.code === "EADDRINUSE" ? said : `failed ${error.code}`));
  server.listen(ports[0], "127.0.0.1", CONNECTIONS, () => {
    process.stdout.write(`port ${ports[0]}\n`);
    process.stdin.on("data", hear);
    listen();
    process.stdin.on("end", () => process.exit());
    process.stdin.on("error", () => process.exit());
    process.stdout.on("error", () => process.exit());
  });
}

start(ports, "taken");
