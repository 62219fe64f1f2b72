// Ties the page together: routes, keys, the scrubber, and what is redrawn when.

import { fill, h } from "./dom.js";
import { clock } from "./format.js";
import { SwarmMap, css } from "./map.js";
import { Curves } from "./curves.js";
import * as pages from "./pages.js";
import { ask, onChange, start, store, travel } from "./store.js";

const $ = (id) => document.getElementById(id);
const extra = { peer: null, peerId: "", work: null, span: null };
let map = null;
let curves = null;

function route() {
  const [path, query] = location.hash.slice(1).split("?");
  const [, page = "", id = ""] = path.split("/");
  return { page: page || "overview", id, query: new URLSearchParams(query ?? "") };
}

// --- drawing

function draw() {
  const { page, id, query } = route();
  const picture = store.shown;
  fill($("notes"), pages.notes(picture));
  $("page-overview").hidden = page !== "overview";
  $("page-other").hidden = page === "overview";
  for (const a of document.querySelectorAll("nav a")) {
    const here = a.dataset.page === page || (a.dataset.page === "runs" && page === "run") || (a.dataset.page === "peers" && page === "peer");
    if (here) a.setAttribute("aria-current", "page"); else a.removeAttribute("aria-current");
  }
  if (page === "overview") {
    fill($("counts"), pages.counts(picture));
    fill($("side"), pages.side(picture));
    map.show(picture);
  } else {
    fill($("page-other"), content(page, id, query, picture));
  }
  const run = page === "run" ? id : page === "overview" ? picture.runs.find((r) => r.state === "training")?.run ?? null : null;
  curves.show(run).then(() => fill($("marks"), marks()));
  status();
}

function content(page, id, query, picture) {
  switch (page) {
    case "runs": return pages.runs(picture);
    case "run": return pages.run(picture, id);
    case "peers": return pages.peers(picture, query);
    case "peer": return pages.peer(picture, id, extra.peerId === id ? extra.peer : null);
    case "fence": return pages.fence(picture, id);
    case "work": return pages.contribution(extra.work);
    default: return [h("h1", {}, "No such page"), h("p", {}, h("a", { href: "#/" }, "Back to the overview"))];
  }
}

function marks() {
  const list = curves.data?.marks ?? [];
  return [h("h2", {}, "Faults and plan changes"), pages.eventList(list, 12)];
}

function status() {
  const dot = $("status").firstElementChild;
  const { live, past, connected } = store;
  const ago = Math.round(Date.now() / 1000 + store.offset - live.time);
  const stale = !connected || live.error || ago > 20;
  dot.className = `dot ${stale ? "silent" : past ? "paused" : "free"}`;
  $("status-text").textContent = !connected ? (live.time ? "connection lost" : "connecting") : past ? "history" : ago > 20 ? `${ago} s old` : "live";
}

/** What the shown page needs beyond the picture. */
async function fetchExtra() {
  const { page, id } = route();
  if (page === "peer") {
    const found = await ask(`/api/peers/${id}`);
    if (found) { extra.peer = found; extra.peerId = id; }
  } else if (page === "work") extra.work = await ask("/api/leaderboard");
  else return;
  draw();
}

// --- scrubber

const scrub = { first: 0, last: 0, timer: 0, wanted: null };  // `wanted`: where the hand put it; null: live

async function loadSpan() {
  const span = await ask("/api/history");
  if (!span || span.first === null) return;
  extra.span = span;
  scrub.first = Math.max(span.first, span.last - 86400);
  scrub.last = Math.max(span.last, scrub.first + 10);
  const slider = $("when");
  slider.min = 0;
  slider.max = Math.ceil(scrub.last - scrub.first);
  slider.step = Math.max(1, Math.round((scrub.last - scrub.first) / 2000));
  slider.value = scrub.wanted === null ? slider.max : scrub.wanted - scrub.first;
  drawTrack();
}

function drawTrack() {
  const canvas = $("track"), span = extra.span;
  const { width, height } = canvas.getBoundingClientRect();
  if (!span || !width) return;
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  const ctx = canvas.getContext("2d");
  ctx.scale(devicePixelRatio, devicePixelRatio);
  const x = (t) => Math.max(0, Math.min(1, (t - scrub.first) / (scrub.last - scrub.first))) * (width - 16) + 8;
  ctx.fillStyle = css("--grid");
  ctx.fillRect(8, height / 2 - 2, width - 16, 4);
  ctx.fillStyle = css("--accent");
  for (const [a, b] of span.watched) if (b >= scrub.first) ctx.fillRect(x(a), height / 2 - 2, Math.max(2, x(b) - x(a)), 4);
  for (const mark of span.marks) {
    if (mark.time < scrub.first || mark.kind === "run") continue;
    ctx.fillStyle = css(mark.kind === "fault" ? "--silent" : "--plan");
    ctx.fillRect(x(mark.time) - 1, 3, 2, height - 6);
  }
}

function scrubbed() {
  const slider = $("when");
  scrub.wanted = Number(slider.value) >= Number(slider.max) ? null : scrub.first + Number(slider.value);
  $("when-text").textContent = scrub.wanted === null ? "now" : clock(scrub.wanted);
  clearTimeout(scrub.timer);
  scrub.timer = setTimeout(() => travel(scrub.wanted), 60);
}

function goLive() {
  $("when").value = $("when").max;
  scrubbed();
}

// --- keys and theme

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* storage may be forbidden */ }
  rethemed();
}

function rethemed() {
  map.restyle();
  curves.redraw(true);
  drawTrack();
}

const KEYS = {
  1: () => { location.hash = "#/"; }, 2: () => { location.hash = "#/runs"; }, 3: () => { location.hash = "#/peers"; },
  4: () => { location.hash = "#/work"; }, m: () => { location.hash = "#/"; setTimeout(() => $("map").focus(), 50); },
  h: () => $("when").focus(), l: goLive, d: switchTheme, "?": () => $("keys").showModal(), Escape: () => { location.hash = "#/"; },
};

function key(e) {
  if (e.ctrlKey || e.metaKey || e.altKey || $("keys").open || (e.target.tagName === "INPUT" && e.target.type !== "range")) return;
  const action = KEYS[e.key];
  if (action) { action(); e.preventDefault(); }
}

// --- start

function begin() {
  map = new SwarmMap($("map"), (kind, id) => { location.hash = `#/${kind}/${id}`; }, (text) => { $("map-said").textContent = text; });
  curves = new Curves($("charts"));
  fill($("legend"), pages.legend());
  addEventListener("hashchange", () => { draw(); fetchExtra(); scrollTo(0, 0); });
  addEventListener("keydown", key);
  addEventListener("resize", drawTrack);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rethemed);
  $("theme").addEventListener("click", switchTheme);
  $("help").addEventListener("click", () => $("keys").showModal());
  $("live").addEventListener("click", goLive);
  $("when").addEventListener("input", scrubbed);
  onChange((what) => {
    $("live").setAttribute("aria-pressed", String(!store.past));
    if (what === "live" && !store.past) { draw(); fetchExtra(); }
    if (what === "live") loadSpan();
    if (what === "time") { draw(); curves.redraw(false); if (!store.past) $("when-text").textContent = "now"; }
    if (what === "status") status();
    if (what === "live" && !document.documentElement.dataset.ready) document.documentElement.dataset.ready = String(Math.round(performance.now()));
  });
  setInterval(() => { if (store.live.time) status(); }, 1000);
  draw();
  start();
}

if (document.readyState === "loading") addEventListener("DOMContentLoaded", begin); else begin();

