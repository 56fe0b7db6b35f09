"""The page at `/`: a stream to look at.  One document, with nothing from outside."""

from __future__ import annotations

from recur.serve.script import SCRIPT

# Every colour that carries meaning stands out from its ground by 4.5 : 1 (lines by 3 : 1).
_STYLE = """
  :root { color-scheme: light dark; --paper: #fff; --text: #1b1b1b; --line: #767676; --grey: #666;
    --one: #1769aa; --two: #b3261e; --three: #2e7d32; --four: #8e24aa; }
  @media (prefers-color-scheme: dark) { :root { --paper: #121212; --text: #ececec; --line: #8a8a8a;
    --grey: #aaa; --one: #6cb6ff; --two: #ff8a80; --three: #81c995; --four: #d7aefb; } }
  body { font: 16px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 62rem; padding: 1rem;
    background: var(--paper); color: var(--text); }
  h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1rem; margin: 0 0 .4rem; }
  section { border: 1px solid var(--line); border-radius: .5rem; margin: .8rem 0; padding: .8rem; }
  .row { display: flex; flex-wrap: wrap; gap: .6rem; align-items: end; margin-top: .5rem; }
  label { display: grid; font-size: .85rem; gap: .15rem; }
  input, select, textarea, button { font: inherit; padding: .3rem .5rem; box-sizing: border-box; }
  input, select, button { min-height: 2.4rem; } input[type=range] { margin: 0; }
  textarea { width: 100%; }
  button { cursor: pointer; } button:disabled { cursor: default; }
  :focus-visible { outline: 3px solid var(--one); outline-offset: 2px; }
  canvas { display: block; width: 100%; border: 1px solid var(--line); box-sizing: border-box; }
  #answer { height: 12rem; } #state { height: 12rem; } #latency, #size { height: 7rem; }
  #output { min-height: 4.5em; max-height: 16em; overflow: auto; white-space: pre-wrap;
    overflow-wrap: anywhere; font-family: ui-monospace, monospace; border: 1px solid var(--line);
    padding: .5rem; margin-top: .4rem; }
  #output .model { color: var(--one); }
  #error { color: var(--two); font-weight: 600; margin: .3rem 0; overflow-wrap: anywhere; }
  #error:empty { display: none; }
  #hint:empty, #rows:empty { display: none; }
  #next { font-family: ui-monospace, monospace; white-space: pre-wrap; }
  .two { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); }
  .small { font-size: .85rem; margin: .3rem 0; overflow-wrap: anywhere; font-weight: 400; }
  .key { display: inline-flex; align-items: center; gap: .3rem; margin-right: .8rem; }
  .key::before { content: ""; width: 1.5rem; border-top: 3px solid var(--grey); }
  .key.in::before { border-top-style: dashed; }
  [data-k="0"]::before { border-color: var(--one); }
  [data-k="1"]::before { border-color: var(--two); }
  [data-k="2"]::before { border-color: var(--three); }
  [data-k="3"]::before { border-color: var(--four); }
  [hidden] { display: none !important; }
  @media (max-width: 32rem) { .row > label { flex: 1 1 100%; } .row input { width: 100%; }
    .row > button { flex: 1 1 auto; } }
"""

_BODY = """
<main>
<h1>recur: live streams</h1>
<p class="small" id="model">Looking for the model…</p>
<section aria-labelledby="stream-title">
  <h2 id="stream-title">Stream</h2>
  <form class="row" id="opening">
    <label>Name (empty: a new one)<input id="name" autocomplete="off" spellcheck="false"
      maxlength="128"></label>
    <label>Its token, if it is open already<input id="token" autocomplete="off"
      spellcheck="false"></label>
    <label id="guard" hidden>The server's bearer token<input id="bearer" type="password"
      autocomplete="off"></label>
    <button id="open">Open</button>
    <button id="reset" type="button" disabled>Reset</button>
  </form>
  <p class="small"><span id="status" role="status">No stream is open: press Open.</span>
    <span id="at"></span></p>
  <p id="error" role="alert"></p>
</section>
<section id="text" hidden aria-labelledby="text-title">
  <h2 id="text-title">Text</h2>
  <label>Type or paste here; every character is one step<textarea id="typed" rows="3"
    spellcheck="false" autocapitalize="off" autocomplete="off"></textarea></label>
  <p class="small" id="hint" role="status"></p>
  <div class="row">
    <button id="write" type="button" disabled>Let the model write</button>
    <label><span>Temperature <span id="heat">0.7</span></span><input id="temperature" type="range"
      min="0" max="1.5" step="0.1" value="0.7"></label>
  </div>
  <p class="small">Likeliest next: <span id="next">–</span></p>
  <div id="output" tabindex="0" role="region"
    aria-label="What was read, and in colour what the model wrote"></div>
</section>
<section id="signal" hidden aria-labelledby="signal-title">
  <h2 id="signal-title">Signal</h2>
  <div class="row">
    <label>Shape<select id="shape"><option>sine</option><option>square</option>
      <option>noise</option><option>by hand</option></select></label>
    <label>Steps a second<input id="pace" type="number" min="1" max="500" value="30"></label>
    <label><span>By hand <span id="hand-now">0</span></span><input id="hand" type="range" min="-1"
      max="1" step="0.01" value="0"></label>
    <button id="run" type="button" disabled>Start</button>
  </div>
  <p class="small" id="legend"><span class="key in">input</span><span class="key"
    data-k="0">answer 1</span><span class="key" data-k="1" hidden>answer 2</span><span class="key"
    data-k="2" hidden>answer 3</span><span class="key" data-k="3" hidden>answer 4</span></p>
  <canvas id="answer" role="img"
    aria-label="The input and the first answers, step by step"></canvas>
</section>
<section aria-labelledby="state-title">
  <h2 id="state-title">Hidden state</h2>
  <canvas id="state" role="img"
    aria-label="Hidden state: one row a unit, one column a step"></canvas>
  <p class="small">One row a unit, one column a step, the newest at the right; blue is −1, red is 1.
    <span id="rows"></span></p>
</section>
<section class="two" aria-label="How the server does">
  <div><h2>Time from sending to answer</h2><p class="small" id="latency-now">–</p>
    <canvas id="latency" role="img" aria-label="Milliseconds from sending to answer"></canvas></div>
  <div><h2>Streams in a step</h2><p class="small" id="size-now">–</p>
    <canvas id="size" role="img" aria-label="How many streams stepped together"></canvas></div>
</section>
</main>
"""

PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>recur: live streams</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
{_BODY}
<script>{SCRIPT}</script>
</body>
</html>
"""
