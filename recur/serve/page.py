"""The page at `/`: a stream to look at.  One document, with nothing from outside."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>recur: live streams</title>
<link rel="icon" href="data:,">
<style>
  :root { color-scheme: light dark; --line: #8886; --ink: #1769aa; --warn: #b3261e; }
  body { font: 16px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 62rem; padding: 1rem; }
  h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1rem; margin: 0 0 .4rem; }
  section { border: 1px solid var(--line); border-radius: .5rem; margin: .8rem 0; padding: .8rem; }
  .row { display: flex; flex-wrap: wrap; gap: .6rem; align-items: end; }
  label { display: grid; font-size: .85rem; gap: .15rem; }
  input, select, textarea, button { font: inherit; padding: .3rem .5rem; }
  textarea { box-sizing: border-box; width: 100%; }
  button { cursor: pointer; } :focus-visible { outline: 3px solid var(--ink); outline-offset: 1px; }
  canvas { display: block; width: 100%; image-rendering: pixelated; border: 1px solid var(--line); }
  #output { min-height: 4.5em; max-height: 16em; overflow: auto; white-space: pre-wrap;
            font-family: ui-monospace, monospace; border: 1px solid var(--line); padding: .5rem; }
  #error { color: var(--warn); font-weight: 600; } .two { display: grid; gap: .8rem;
    grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); }
  .small { font-size: .85rem; opacity: .85; margin: .3rem 0; }
  [hidden] { display: none !important; }
</style>
</head>
<body>
<main>
<h1>recur: live streams</h1>
<p class="small" id="model">Looking for the model…</p>
<section aria-labelledby="stream-title">
  <h2 id="stream-title">Stream</h2>
  <form class="row" id="opening">
    <label>Name (empty: a new one)<input id="name" autocomplete="off" maxlength="128"></label>
    <label>Its token, if it is open already<input id="token" autocomplete="off"></label>
    <label>Server's bearer token, if it has one<input id="bearer" type="password"
      autocomplete="off"></label>
    <button id="open">Open</button>
    <button id="reset" type="button" disabled>Reset</button>
  </form>
  <p class="small" id="status" role="status" aria-live="polite">No stream is open.</p>
  <p id="error" role="alert"></p>
</section>
<section id="text" hidden aria-labelledby="text-title">
  <h2 id="text-title">Text</h2>
  <label>Type here; every character is one step<textarea id="typed" rows="3"></textarea></label>
  <div class="row">
    <button id="write" type="button" disabled>Let the model write</button>
    <label>Temperature <span id="heat">0.7</span><input id="temperature" type="range" min="0"
      max="1.5" step="0.1" value="0.7"></label>
  </div>
  <p class="small">Likeliest next: <output id="next">–</output></p>
  <div id="output" tabindex="0" aria-label="The text that was read and written"></div>
</section>
<section id="signal" hidden aria-labelledby="signal-title">
  <h2 id="signal-title">Signal</h2>
  <div class="row">
    <label>Shape<select id="shape"><option>sine</option><option>square</option>
      <option>noise</option><option>by hand</option></select></label>
    <label>Steps a second<input id="pace" type="number" min="1" max="500" value="30"></label>
    <label>By hand<input id="hand" type="range" min="-1" max="1" step="0.01" value="0"></label>
    <button id="run" type="button" disabled>Start</button>
  </div>
  <p class="small">Input (thin) and first answers</p>
  <canvas id="answer" width="600" height="140" role="img" aria-label="Input and answers"></canvas>
</section>
<section aria-labelledby="state-title">
  <h2 id="state-title">Hidden state</h2>
  <canvas id="state" width="300" height="96" role="img"
    aria-label="Hidden state: one row a unit, one column a step"></canvas>
  <p class="small">One row a unit, one column a step; blue is −1, red is 1.</p>
</section>
<section class="two">
  <div><h2>Time of a step <span id="latency-now" class="small"></span></h2>
    <canvas id="latency" width="300" height="90" role="img" aria-label="Latency"></canvas></div>
  <div><h2>Streams in a step <span id="size-now" class="small"></span></h2>
    <canvas id="size" width="300" height="90" role="img" aria-label="Batch size"></canvas></div>
</section>
</main>
<script>
"use strict";
const $ = id => document.getElementById(id);
let model = null, socket = null, held = null, step = 0, sent = new Map(), latencies = [];
let writing = false, running = null, waiting = [], inputs = [], answers = [], asked = 0;

const headers = () => $("bearer").value ? {Authorization: "Bearer " + $("bearer").value} : {};
async function ask(path) {
  const answer = await fetch(path, {headers: headers()});
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  return answer.json();
}
async function look() {
  try {
    model = await ask("v1/model");
    $("model").textContent = model.model;
    $("text").hidden = !model.characters;
    $("signal").hidden = !!model.characters;
  } catch (problem) { $("model").textContent = problem.message; }
}
function fail(text) { $("error").textContent = text; }
function ready(on) {
  for (const id of ["reset", "write", "run"]) $(id).disabled = !on;
  if (!on) { writing = false; stopSignal(); $("write").textContent = "Let the model write"; }
}
$("opening").addEventListener("submit", async event => {
  event.preventDefault();
  fail("");
  if (!model) await look();
  if (socket) { socket.onclose = null; socket.close(); }
  ready(false); sent.clear(); waiting = [];
  const name = $("name").value || null, token = $("token").value;
  const first = token ? {resume: name, token} : {open: name};
  if ($("bearer").value) first.bearer = $("bearer").value;
  socket = new WebSocket(location.origin.replace("http", "ws") + location.pathname + "v1/ws");
  socket.onopen = () => socket.send(JSON.stringify({...first, show: true}));
  socket.onmessage = event => take(JSON.parse(event.data));
  socket.onclose = event => {
    ready(false);
    $("status").textContent = "The stream's connection has ended. Open goes on with it.";
    if (event.reason && !$("error").textContent) fail(event.reason);
  };
});
function take(message) {
  if (message.error) return fail(message.error.message);
  if (message.token) {
    held = message; step = asked = message.step;
    $("name").value = held.id; $("token").value = held.token;
    ready(true);
    $("status").textContent = `Stream ${held.id} is open at step ${step}.`;
    if (model.characters && step === 0) send(indexOf("\\n"));
    return;
  }
  step = message.step;
  if (step === 0) { asked = 0; return; }
  $("status").textContent = `Stream ${held.id} stands at step ${step}.`;
  const began = sent.get(step); sent.delete(step);
  if (began !== undefined) latencies = [...latencies.slice(-239), performance.now() - began];
  if (message.state) paint(message.state);
  if (model.characters) read(message.y); else plot(message.y);
  waiting.splice(0).forEach(f => f());
}
function send(x) {
  if (!socket || socket.readyState !== 1) return;
  asked += 1;
  sent.set(asked, performance.now());
  socket.send(JSON.stringify({step: asked, x}));
}
$("reset").addEventListener("click", () => {
  sent.clear(); socket.send('{"reset": true}');
  asked = 0; $("output").textContent = "";
  if (model.characters) send(indexOf("\\n"));
});

// Text: every character is a step; the answer is the logits of the next.
const indexOf = c => Math.max(model.characters.indexOf(c), 0);
$("typed").addEventListener("input", event => {
  const text = event.data ?? (event.inputType === "insertLineBreak" ? "\\n" : "");
  for (const c of text) { show(c); send(indexOf(c)); }
});
$("temperature").addEventListener("input", () => $("heat").textContent = $("temperature").value);
function show(c) {
  $("output").append(c);
  $("output").scrollTop = $("output").scrollHeight;
}
function chances(logits, heat) {
  const top = Math.max(...logits.slice(1));
  const weights = logits.map((v, i) => i ? Math.exp((v - top) / heat) : 0);
  const sum = weights.reduce((a, b) => a + b);
  return weights.map(w => w / sum);
}
function read(logits) {
  const p = chances(logits, 1), best = p.map((v, i) => [v, i]).sort((a, b) => b[0] - a[0]);
  $("next").textContent = best.slice(0, 5).map(([v, i]) =>
    `${JSON.stringify(model.characters[i])} ${(100 * v).toFixed(0)} %`).join("  ");
  if (!writing || sent.size) return;
  const heat = Math.max(+$("temperature").value, 0.001);
  let left = Math.random(), pick = best[0][1];
  for (const [i, v] of chances(logits, heat).entries()) if ((left -= v) < 0) { pick = i; break; }
  setTimeout(() => { if (writing) { show(model.characters[pick]); send(pick); } }, 25);
}
$("write").addEventListener("click", () => {
  writing = !writing;
  $("write").textContent = writing ? "Stop" : "Let the model write";
  if (writing) { show("\\n"); send(indexOf("\\n")); }
});

// Signals: the same number in every feature, shifted a little from one to the next.
function signal(t, i) {
  const shape = $("shape").value, phase = t / 10 + i / 3;
  if (shape === "sine") return Math.sin(phase);
  if (shape === "square") return Math.sign(Math.sin(phase));
  return shape === "noise" ? 2 * Math.random() - 1 : +$("hand").value;
}
function beat() {
  if (sent.size < 50) {
    const x = Array.from({length: model.n_in ?? 1}, (_, i) => signal(asked, i));
    inputs = [...inputs.slice(-299), x[0]];
    send(x);
  }
}
function stopSignal() { clearInterval(running); running = null; $("run").textContent = "Start"; }
$("run").addEventListener("click", () => {
  if (running) return stopSignal();
  running = setInterval(beat, 1000 / Math.min(Math.max(+$("pace").value || 30, 1), 500));
  $("run").textContent = "Stop";
});
$("hand").addEventListener("input", () => { if (!running && held) beat(); });
function plot(y) {
  answers = [...answers.slice(-299), y.slice(0, 4)];
  const canvas = $("answer"), pen = canvas.getContext("2d");
  pen.clearRect(0, 0, canvas.width, canvas.height);
  line(pen, inputs, canvas, "#888", 1);
  ["#1769aa", "#b3261e", "#2e7d32", "#8e24aa"].forEach((colour, k) =>
    y.length > k && line(pen, answers.map(a => a[k]), canvas, colour, 2));
}
function line(pen, values, canvas, colour, width, from) {
  const low = from ?? Math.min(-1, ...values), high = Math.max(from === 0 ? 1e-9 : 1, ...values);
  pen.beginPath(); pen.strokeStyle = colour; pen.lineWidth = width;
  values.forEach((v, i) => pen.lineTo(i * canvas.width / Math.max(values.length, 60),
    canvas.height - 4 - (v - low) / (high - low) * (canvas.height - 8)));
  pen.stroke();
}
function paint(state) {
  const canvas = $("state"), rows = Math.min(state.length, 256);
  if (canvas.height !== rows) { canvas.height = rows; canvas.style.height = "12rem"; }
  const pen = canvas.getContext("2d");
  pen.drawImage(canvas, -1, 0);
  const column = pen.createImageData(1, rows);
  for (let i = 0; i < rows; i++) {
    const v = Math.max(-1, Math.min(1, state[i])), pale = 255 * (1 - Math.abs(v));
    column.data.set([v > 0 ? 255 : pale, pale, v < 0 ? 255 : pale, 255], 4 * i);
  }
  pen.putImageData(column, canvas.width - 1, 0);
}
function curve(id, values) {
  const canvas = $(id), pen = canvas.getContext("2d");
  pen.clearRect(0, 0, canvas.width, canvas.height);
  line(pen, values, canvas, "#1769aa", 2, 0);
}
async function watch() {
  curve("latency", latencies);
  if (latencies.length) $("latency-now").textContent = latencies.at(-1).toFixed(1) + " ms";
  try {
    const recent = await ask("v1/recent");
    curve("size", recent.sizes);
    $("size-now").textContent = `${recent.sizes.at(-1) ?? 0} of ${recent.streams}`;
  } catch { /* the next look may find the server again */ }
  setTimeout(watch, 1000);
}
$("bearer").addEventListener("change", look);
look().then(watch);
</script>
</body>
</html>
"""
