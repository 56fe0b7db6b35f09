"""What the page at `/` does: one script, put into the page, with nothing from outside."""

from __future__ import annotations

SCRIPT = r"""
"use strict";
const $ = id => document.getElementById(id);
const COLUMNS = 300;  // steps that the pictures show
// Errors that a later attempt may not meet.
const PASSING = ["busy", "stopping", "store", "internal"];
let model = null, socket = null, held = null, step = 0, asked = 0, sent = new Map();
let writing = false, running = null, resetting = false, logits = null, drawing = false;
let pause = 0, retry = null, thinking = null, typed = "";
let latencies = [], inputs = [], answers = [], states = [], sizes = [];

// About the server.
const headers = () => $("bearer").value ? {Authorization: "Bearer " + $("bearer").value} : {};
async function ask(path) {
  const answer = await fetch(path, {headers: headers()});
  if (answer.ok) return answer.json();
  const {error} = await answer.json();
  if (error.code === "unauthorised") $("guard").hidden = false;
  throw new Error(error.message);
}
async function look() {
  try {
    model = await ask("v1/model");
    $("model").textContent = model.model;
    $("text").hidden = !model.characters;
    $("signal").hidden = !!model.characters;
    if (model.n_in > 1) $("legend").firstChild.textContent = `input 1 of ${model.n_in}`;
  } catch (problem) { $("model").textContent = problem.message; }
}
const fail = text => { $("error").textContent = text; };
const say = text => { $("status").textContent = text; };
const live = () => held && socket && socket.readyState === 1;

// The stream's connection.  What was not answered is kept, and sent again when it is back.
$("opening").addEventListener("submit", async event => {
  event.preventDefault();
  fail("");
  if (!model) await look();
  if (!model) return;
  stop();
  drop();
  held = null; sent.clear(); resetting = false; logits = null; pause = 0;
  const name = $("name").value || null, token = $("token").value;
  if (token && !name) return fail("The token is of a stream: its name is needed too.");
  connect(token ? {resume: name, token} : {open: name}, true);
});
function drop() {
  clearTimeout(retry);
  if (socket) { socket.onclose = socket.onmessage = socket.onopen = null; socket.close(); }
  socket = null;
}
function connect(first, fresh) {
  if ($("bearer").value) first.bearer = $("bearer").value;
  const mine = new WebSocket(location.origin.replace("http", "ws") + location.pathname + "v1/ws");
  let problem = null;
  socket = mine;
  mine.onopen = () => mine.send(JSON.stringify({...first, show: true}));
  mine.onmessage = event => {
    const message = JSON.parse(event.data);
    if (message.error) problem = message.error;
    else if (message.token) opened(message, fresh);
    else take(message);
  };
  mine.onclose = event => {
    if (problem && !PASSING.includes(problem.code)) return ended(problem);
    if (!held) {
      say("No stream is open.");
      return fail(problem ? problem.message : "The server does not answer. Open tries again.");
    }
    say("The connection is lost. Trying again until the server is back.");
    if (problem) fail(problem.message);
    pause = Math.min(2 * pause || 250, 4000);
    retry = setTimeout(() => connect({resume: held.id, token: held.token}, false), pause);
  };
}
function ended(problem) {
  stop();
  if (["unknown", "expired"].includes(problem.code)) $("token").value = "";  // Open begins anew
  if (problem.code === "unauthorised") $("guard").hidden = false;
  held = null;
  for (const id of ["reset", "write", "run"]) $(id).disabled = true;
  say("No stream is open.");
  fail(problem.message);
}
function opened(message, fresh) {
  held = {id: message.id, token: message.token};
  pause = 0;
  fail("");
  $("name").value = held.id; $("token").value = held.token;
  for (const id of ["reset", "write", "run"]) $(id).disabled = false;
  at(message.step);
  if (!fresh) return again();
  asked = step;
  inputs = []; answers = []; states = []; latencies = [];
  say(`Stream ${held.id} is open.`);
  if (model.characters) { $("typed").focus(); if (step === 0) send(indexOf("\n")); }
  else $("run").focus();
}
function again() {
  say(`Stream ${held.id} is back.`);
  const rest = resetting ? [] : [...sent].filter(([number]) => number >= Math.max(step, 1));
  sent.clear();
  if (resetting) return socket.send('{"reset": true}');
  if (rest.length && rest[0][0] > step + 1) {
    rest.length = 0;
    fail("The server has gone back to an earlier step, and the stream goes on from there.");
  }
  asked = step;
  for (const [number, {x}] of rest) { asked = number - 1; send(x); }
  if (!rest.length && writing) think();
}
function at(number) {
  step = number;
  $("at").textContent = `Step ${step}`;
}
function take(message) {
  if (resetting && message.step !== 0) return;  // asked for before the reset
  at(message.step);
  if (step === 0) {
    resetting = false; asked = 0;
    say(`Stream ${held.id} is at rest again.`);
    if (model.characters) send(indexOf("\n"));
    return;
  }
  const one = sent.get(step); sent.delete(step);
  if (one) latencies = [...latencies.slice(-239), performance.now() - one.began];
  if (message.state) states = [...states.slice(1 - COLUMNS), message.state];
  if (model.characters) read(message.y);
  else {
    inputs = [...inputs.slice(1 - COLUMNS), one ? one.x[0] : NaN];
    answers = [...answers.slice(1 - COLUMNS), message.y];
  }
  draw();
}
function send(x) {
  if (!live() || resetting) return;
  asked += 1;
  sent.set(asked, {x, began: performance.now()});
  socket.send(JSON.stringify({step: asked, x}));
}
$("reset").addEventListener("click", () => {
  if (!live()) return fail("The stream is not connected.");
  fail("");
  clearTimeout(thinking);
  sent.clear(); logits = null; resetting = true;
  inputs = []; answers = []; states = [];
  $("output").textContent = ""; $("next").textContent = "–";
  socket.send('{"reset": true}');
});
function stop() {
  writing = false;
  clearTimeout(thinking); clearInterval(running);
  running = null;
  $("write").textContent = "Let the model write"; $("run").textContent = "Start";
}

// Text: every character is a step; the answer is the logits of the next.
const indexOf = c => Math.max(model.characters.indexOf(c), 0);
function type() {
  const now = $("typed").value;
  let begin = 0, end = 0;
  while (begin < Math.min(typed.length, now.length) && typed[begin] === now[begin]) begin++;
  while (end < Math.min(typed.length, now.length) - begin
         && typed[typed.length - 1 - end] === now[now.length - 1 - end]) end++;
  const fresh = now.slice(begin, now.length - end), strange = new Set();
  if (typed.length - begin - end > 0) {
    $("hint").textContent = "What was taken away here stays in the stream: it has been read.";
  } else $("hint").textContent = "";
  typed = now;
  if (fresh && !live()) { $("hint").textContent = "No stream is open to read this."; return; }
  for (const c of fresh) {
    if (!model.characters.includes(c)) strange.add(c);
    show(c, "mine");
    send(indexOf(c));
  }
  if (strange.size) $("hint").textContent = "The model does not know " +
    [...strange].map(c => JSON.stringify(c)).join(" ");
}
$("typed").addEventListener("input", event => { if (!event.isComposing) type(); });
$("typed").addEventListener("compositionend", type);
$("temperature").addEventListener("input", () => {
  $("heat").textContent = $("temperature").value;
});
function show(text, kind) {
  const output = $("output"), follow =
    output.scrollHeight - output.scrollTop - output.clientHeight < 30;
  let last = output.lastElementChild;
  if (!last || last.className !== kind) {
    last = document.createElement("span");
    last.className = kind;
    output.append(last);
  }
  last.append(text);
  last.normalize();
  if (output.textContent.length > 20000) output.firstElementChild.textContent = "…";
  if (follow) output.scrollTop = output.scrollHeight;
}
function chances(values, heat) {
  const top = Math.max(...values.slice(1));
  const weights = values.map((v, i) => i ? Math.exp((v - top) / heat) : 0);
  const sum = weights.reduce((a, b) => a + b);
  return weights.map(w => w / sum);
}
function read(y) {
  logits = y;
  const best = chances(y, 1).map((v, i) => [v, i]).sort((a, b) => b[0] - a[0]);
  $("next").textContent = best.slice(0, 5).map(([v, i]) =>
    `${JSON.stringify(model.characters[i])} ${(100 * v).toFixed(0)} %`).join("   ");
  if (writing && !sent.size) think();
}
function think() {
  clearTimeout(thinking);
  thinking = setTimeout(() => {
    if (!writing || sent.size || !live()) return;
    if (!logits) return send(indexOf("\n"));
    const p = chances(logits, Math.max(+$("temperature").value, 0.001));
    let left = Math.random(), pick = p.indexOf(Math.max(...p));
    for (const [i, v] of p.entries()) if ((left -= v) < 0) { pick = i; break; }
    show(model.characters[pick], "model");
    send(pick);
  }, 25);
}
$("write").addEventListener("click", () => {
  if (writing) return stop();
  writing = true;
  $("write").textContent = "Stop";
  think();
});

// Signals: the same number in every feature, shifted a little from one to the next.
function signal(t, i) {
  const shape = $("shape").value, phase = t / 10 + i / 3;
  if (shape === "sine") return Math.sin(phase);
  if (shape === "square") return Math.sign(Math.sin(phase));
  return shape === "noise" ? 2 * Math.random() - 1 : +$("hand").value;
}
function beat() {
  if (sent.size >= 50 || !live() || resetting) return;
  const index = model.vocabulary !== null;
  const x = Array.from({length: index ? 1 : model.n_in ?? 1}, (_, i) => signal(asked, i));
  if (index) x[0] = Math.round((x[0] + 1) / 2 * (model.vocabulary - 1));
  send(x);
}
$("run").addEventListener("click", () => {
  if (running) return stop();
  running = setInterval(beat, 1000 / Math.min(Math.max(+$("pace").value || 30, 1), 500));
  $("run").textContent = "Stop";
});
$("pace").addEventListener("change", () => {
  if (running) { $("run").click(); $("run").click(); }
});
$("hand").addEventListener("input", () => {
  $("hand-now").textContent = $("hand").value;
  $("shape").value = "by hand";
  if (!running) beat();
});

// Pictures: drawn anew, at most once a frame, in the colours and the resolution of the window.
function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => { drawing = false; paint(); });
}
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function sheet(id) {
  const canvas = $(id), scale = window.devicePixelRatio || 1, pen = canvas.getContext("2d");
  canvas.width = Math.round(canvas.clientWidth * scale);
  canvas.height = Math.round(canvas.clientHeight * scale);
  pen.scale(scale, scale);
  return [pen, canvas.clientWidth, canvas.clientHeight];
}
function span(lists, floor) {
  const all = lists.flat().filter(Number.isFinite);
  return [Math.min(floor, ...all), Math.max(floor === 0 ? 1e-9 : 1, ...all)];
}
function line(pen, values, w, h, [low, high], length, stroke, dash) {
  pen.beginPath(); pen.strokeStyle = stroke; pen.lineWidth = 2; pen.setLineDash(dash);
  values.forEach((v, i) => {
    const x = (length - values.length + i) * w / (length - 1);
    if (Number.isFinite(v)) pen.lineTo(x, h - 3 - (v - low) / (high - low) * (h - 6));
  });
  pen.stroke(); pen.setLineDash([]);
}
const short = v => Math.abs(v) >= 100 ? v.toFixed(0) : String(+v.toPrecision(2));
function scale(pen, h, [low, high], unit) {
  pen.font = "12px system-ui, sans-serif"; pen.lineWidth = 4;
  pen.strokeStyle = colour("--paper"); pen.fillStyle = colour("--text");
  for (const [text, y] of [[short(high) + unit, 14], [short(low) + unit, h - 5]]) {
    pen.strokeText(text, 4, y); pen.fillText(text, 4, y);
  }
}
function curve(id, values, unit, length) {
  const [pen, w, h] = sheet(id), range = span([values], 0);
  line(pen, values, w, h, range, length, colour("--one"), []);
  if (values.length) scale(pen, h, range, unit);
}
function paint() {
  if (model && !model.characters) {
    const [pen, w, h] = sheet("answer"), count = Math.min(answers.at(-1)?.length ?? 1, 4);
    const lines = Array.from({length: count}, (_, k) => answers.map(a => a[k]));
    const range = span([inputs, ...lines], -1);
    line(pen, inputs, w, h, range, COLUMNS, colour("--grey"), [4, 3]);
    const names = ["--one", "--two", "--three", "--four"];
    lines.forEach((one, k) => line(pen, one, w, h, range, COLUMNS, colour(names[k]), []));
    scale(pen, h, range, "");
    for (const e of document.querySelectorAll("#legend [data-k]")) e.hidden = e.dataset.k >= count;
  }
  const [pen, w, h] = sheet("state"), rows = Math.min(states.at(-1)?.length ?? 0, 256);
  if (rows) heat(pen, w, h, rows);
  if (model && model.hidden > 256)
    $("rows").textContent = `The first 256 of ${model.hidden} units.`;
  curve("latency", latencies, " ms", 240);
  curve("size", sizes, "", 240);
}
function heat(pen, w, h, rows) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const zero = dark ? [18, 18, 18] : [255, 255, 255];
  const ends = dark ? [[90, 170, 255], [255, 110, 100]] : [[0, 60, 200], [200, 0, 20]];
  const picture = new ImageData(COLUMNS, rows);
  states.forEach((state, t) => {
    for (let i = 0; i < rows; i++) {
      const v = Math.max(-1, Math.min(1, state[i])), end = ends[v > 0 ? 1 : 0];
      const pixel = zero.map((z, k) => z + (end[k] - z) * Math.abs(v) ** 0.75);
      picture.data.set([...pixel, 255], 4 * (i * COLUMNS + COLUMNS - states.length + t));
    }
  });
  const small = new OffscreenCanvas(COLUMNS, rows);
  small.getContext("2d").putImageData(picture, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, 0, 0, w, h);
}
async function watch() {
  try {
    const recent = await ask("v1/recent"), pool = recent.seconds.at(-1);
    sizes = recent.sizes;
    $("size-now").textContent = `${sizes.at(-1) ?? 0} of ${recent.streams} in memory`;
    if (latencies.length) $("latency-now").textContent =
      `${latencies.at(-1).toFixed(1)} ms`
      + (pool ? `, ${(1e3 * pool).toFixed(2)} ms of it in the pool` : "");
  } catch { $("size-now").textContent = "the server does not answer"; }
  draw();
  setTimeout(watch, 1000);
}
$("bearer").addEventListener("change", look);
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
look().then(watch);
"""
